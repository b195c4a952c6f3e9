"""The page's files, without a browser: strict headers, and nothing from elsewhere."""

import re

from vllm_metal_lite.server.page import FOLDER


def test_files_come_with_strict_headers(http):
    for path in FOLDER.rglob("*"):
        if path.is_file() and path.suffix != ".md":
            response = http.get(f"/page/{path.relative_to(FOLDER).as_posix()}")
            assert response.content == path.read_bytes()
            policy = response.headers["content-security-policy"]
            assert "default-src 'none'" in policy
            assert "unsafe" not in policy
            assert response.headers["x-content-type-options"] == "nosniff"
    index = http.get("/")
    assert index.headers["content-type"] == "text/html; charset=utf-8"
    known = http.get("/", headers={"If-None-Match": index.headers["etag"]})
    assert (known.status_code, known.content) == (304, b"")


def test_nothing_comes_from_elsewhere_and_nothing_is_inline():
    for path in [*FOLDER.glob("*.html"), *FOLDER.glob("*.css"), *FOLDER.glob("**/*.js")]:
        if "vendor" in path.parts:
            continue
        text = path.read_text("utf-8").replace("http://www.w3.org/2000/svg", "")
        assert not re.search(r"https?://[a-z]", text), path
        assert ".innerHTML" not in text, path
    index = (FOLDER / "index.html").read_text("utf-8")
    assert not re.search(r"<style|<script>|\son[a-z]+=|\sstyle=", index)


def test_sizes_are_those_of_the_scales():
    """Spaces, corners and type come from variables, and each variable is used."""
    sheets = [path.read_text("utf-8") for path in FOLDER.glob("*.css")]
    rules = re.sub(r"/\*.*?\*/", "", "".join(sheets), flags=re.S)
    kinds = r"(?:margin|padding|gap|column-gap|border-radius|font|font-size)(?:-[a-z-]+)?"
    sizes = re.findall(rf"[ {{;]({kinds}): ([^;}}]+)", rules)
    assert len(sizes) > 150
    literal = re.compile(r"(?<![\w.-])(?!0|1px)[\d.]+(?:px|rem|pt)")
    assert not [size for size in sizes if literal.search(size[1])]
    scripts = "".join(path.read_text("utf-8") for path in FOLDER.rglob("*.js"))
    defined = set(re.findall(r"(--[\w-]+):", rules))
    assert not {name for name in defined if not re.search(rf"{name}[\")]", rules + scripts)}
