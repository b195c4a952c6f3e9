"""Markdown of an answer in a real browser: shown as it grows, and harmless."""

import pytest
from playwright.sync_api import expect

pytestmark = pytest.mark.long


def test_markup_in_an_answer_is_harmless(view, page):
    evil = """<script>window.bad = 1</script><img src="/x" onerror="window.bad = 2">
<a href="javascript:window.bad = 3" id="prompt">link</a> <svg onload="window.bad = 4"></svg>

![picture](https://example.com/track.png) <iframe src="https://example.com"></iframe>

<style>body { display: none }</style><form action="https://example.com"><input name="x"></form>

<div style="position: fixed; inset: 0" class="offscreen">over</div>

[go](javascript:window.bad%20=%205)
[there](https://example.com/a)
"""
    view.answer_with({"content": evil})
    view.answer_to(evil)
    assert page.evaluate("window.bad") is None
    inside = page.locator(".message .text")
    tags = ["script", "img", "iframe", "style", "form", "input", "svg"]
    for tag in [*tags, "[style]", "[id]", "[onerror]"]:
        expect(inside.locator(tag)).to_have_count(0)
    expect(inside.locator("[class=offscreen]")).to_have_count(0)
    expect(page.locator(".assistant .text")).to_contain_text("<script>window.bad = 1</script>")
    hrefs = inside.locator("a[href]").evaluate_all("all => all.map((a) => a.getAttribute('href'))")
    assert hrefs == ["https://example.com/track.png", "https://example.com/a"]
    link = inside.locator("a[href]").last
    assert link.get_attribute("rel") == "noopener noreferrer"
    assert link.get_attribute("target") == "_blank"


def test_markdown_and_copied_code(open_page):
    view = open_page(permissions=["clipboard-read", "clipboard-write"])
    text = (
        "# Head\n\n| a | b |\n|---|--:|\n| 1 | 2 |\n\n```python\nprint('<hi>')\n```\n\n- **one**\n"
        "\n2. two\n\nשלום\n\n<ul>\n<li>\n"
    )
    view.answer_with(*({"content": c} for c in text))
    view.answer_to("show me")
    answer = view.text
    expect(answer.locator("h1")).to_have_text("Head")
    expect(answer.locator("td")).to_have_text(["1", "2"])
    expect(answer.locator("td").last).to_have_css("text-align", "-webkit-right")
    expect(answer.locator("strong")).to_have_text("one")
    expect(answer.locator("ol")).to_have_attribute("start", "2")
    expect(answer.locator("p").first).to_have_css("direction", "rtl")
    assert answer.locator("p").last.inner_text() == "<ul>\n<li>"
    expect(answer.locator(".code-bar")).to_have_text("python")
    answer.get_by_label("Copy code").click()
    expect(view.page.locator("#status")).to_have_text("Copied")
    expect(answer.locator(".done use")).to_have_attribute("href", "#i-check")
    expect(answer.locator(".hljs-built_in")).to_have_text("print")
    assert view.page.evaluate("navigator.clipboard.readText()") == "print('<hi>')\n"


_GROWS = """First *line*.

- one
- two

  | a | b |
  |---|---|
  | 1 | 2 |

1. first
2. second

```python
def f():

    return 1
```

> quote
> continues

Then $a\\,b$ and

$$
x_1 \\, y
$$

Last line<br>ends\r\nhere.
"""


def test_a_refused_link_looks_like_text(view):
    view.answer_with({"content": "[go](javascript:x) or [there](https://example.com)"})
    view.answer_to("where?")
    shown = "e => [getComputedStyle(e).color, getComputedStyle(e).textDecorationLine]"
    text, refused, link = (
        view.text.locator(e).evaluate(shown) for e in ("p", "a >> nth=0", "a[href]")
    )
    assert refused == text
    assert link[0] != text[0]
    assert link[1] == "underline"


@pytest.mark.parametrize(
    ("text", "formulas"),
    [
        (r"so $O(n\,+\,m)$ is", [r"$O(n\,+\,m)$"]),
        (r"$a_1 * b_2 * c$, $\{x\}$ and $n$.", ["$a_1 * b_2 * c$", r"$\{x\}$", "$n$"]),
        (r"\(a \\ b\) and \[x_1\]", [r"\(a \\ b\)", r"\[x_1\]"]),
        ("at last\n$$\n\\sum_i x_i \\\\\n\\, y\n$$\nit is", ["\\sum_i x_i \\\\\n\\, y"]),
        ("\\[\n*a* * b\n\\]", ["*a* * b"]),
        ("It costs $5 and *not* $10 or $HOME/$USER", []),
        (r"\$5 \* 2 = \$10", []),
        ("`$x_1$`", ["$x_1$"]),
        ("```\n$$x$$\n```", ["$$x$$\n"]),
    ],
)
def test_a_formula_stays_as_it_is_written(page, text, formulas):
    found = page.evaluate(
        """async (text) => {
          const { Growing } = await import("/page/markdown.js");
          const place = document.createElement("div");
          new Growing(place).show(text, true);
          return [...place.querySelectorAll("code")].map((e) => e.textContent);
        }""",
        text,
    )
    assert found == formulas


@pytest.mark.parametrize("step", [1, 7, 100])
def test_an_answer_that_grew_looks_like_one_that_came_at_once(open_page, step):
    found = open_page().page.evaluate(
        """async ([text, step]) => {
          const { Growing } = await import("/page/markdown.js");
          const [grown, once] = [0, 1].map(() => document.createElement("div"));
          const growing = new Growing(grown);
          for (let n = step; n < text.length + step; n += step) {
            growing.show(text.slice(0, n), false);
          }
          new Growing(once).show(text, true);
          return [grown.innerText, once.innerText, growing.done];
        }""",
        [_GROWS, step],
    )
    assert found[0].split() == found[1].split()
    if step < 100:
        assert found[2] > len(_GROWS) / 2  # most of it was not rendered again


def test_deep_nesting_is_shown_as_text(view, page):
    deep = ">" * 20_000
    view.answer_with({"content": "Once.\n\n"}, {"content": deep})
    assert deep in view.answer_to("quote")
    view.reload()
    expect(view.text.locator("pre")).to_contain_text(deep)
