"""Pictures in requests: found in messages, fetched, read on a thread, placed in the prompt."""

from collections.abc import Callable, Mapping, Sequence
from dataclasses import dataclass, field, replace
from typing import Any, TypeGuard

from vllm_metal_lite.engine.chat_checkpoints import Message
from vllm_metal_lite.errors import RequestError
from vllm_metal_lite.images.eyes import Processor, too_many
from vllm_metal_lite.images.family import Prepared
from vllm_metal_lite.server.errors import bad, must_be
from vllm_metal_lite.server.media import Media
from vllm_metal_lite.server.offload import REQUESTER, check_wanted
from vllm_metal_lite.server.templates import together

NO_MEDIA = Media()
# The place of a picture in a body, and its URL or its file.
Found = tuple[str, str | bytes]
# The types of parts that hold a picture: in chat completions, in Responses and in Anthropic's API.
KINDS = ("image_url", "input_image", "image")


@dataclass
class Pictures:
    """Collects the pictures of a request while its messages are converted.

    refusal: why the model takes no pictures; None: it takes them.  most: the most of a prompt.
    media: fetches pictures by http URL.
    found: the place in the body of each picture, and its URL or, once fetched, its file.
    """

    refusal: str | None = ""
    most: int = 0
    media: Media = NO_MEDIA
    found: list[Found] = field(default_factory=list)

    def take(self, part: Mapping[str, Any], where: str) -> dict[str, Any]:
        """The part that a template gets for a picture.  `index`: the picture's place in `found`.
        Raises ApiError (400)."""
        at, url = _url_of(part, where)
        if _is_remote(url) and not self.media.domains:
            raise bad(at, ": this server fetches no pictures; send a data: URL")
        self.found.append((where, url))
        return {"type": "image", "index": len(self.found) - 1}

    async def fetch(self) -> None:
        """Fetch the pictures by http URL.  Raises ApiError (400), also for too many pictures."""
        if (count := len(self.found)) > self.most:
            raise bad(self.found[self.most][0], f": {too_many(self.most, count)}")
        if places := {url: where for where, url in reversed(self.found) if _is_remote(url)}:
            files: dict[Any, bytes] = await self.media.fetch(places)
            self.found = [(where, files.get(url, url)) for where, url in self.found]
            requester = REQUESTER.get()
            size = requester.size + sum(map(len, files.values()))
            REQUESTER.set(replace(requester, size=size))


# For places where no model takes pictures; it never collects any.
TEXT_ONLY = Pictures()
OF_SYSTEM = Pictures("chat templates leave out pictures of system messages")


def _is_remote(url: str | bytes) -> TypeGuard[str]:
    return isinstance(url, str) and url.lower().startswith(("http:", "https:"))


def _url_of(part: Mapping[str, Any], where: str) -> tuple[str, str]:
    """Returns the place of a picture's URL in the body, and the URL."""
    name = "source" if part.get("type") == "image" else "image_url"
    where, url = f"{where}.{name}", part.get(name)
    if isinstance(url, Mapping):
        if url.get("type") == "base64":  # Anthropic's
            if not isinstance(data := url.get("data"), str):
                raise must_be(f"{where}.data", "a string", data)
            return where, f"data:{url.get('media_type')};base64,{data}"
        where, url = f"{where}.url", url.get("url")
    if not isinstance(url, str):
        raise must_be(where, "a data: URL", url)
    return where, url


def place(
    processor: Processor,
    found: Sequence[Found],
    messages: Sequence[Message],
    render: Callable[[Sequence[Message]], str],
) -> tuple[Sequence[Message], list[Prepared]]:
    """(Messages for which the template writes each picture's placeholder, the prepared pictures in
    the order of the prompt).

    Some templates leave out the pictures of tools, so a user's message gets these pictures.
    Raises ApiError (400) for a picture that cannot be read, RequestError if the numbers differ.
    """
    prepared = [_prepared(processor, *picture) for picture in found]
    placeholder, first = processor.family.placeholder, None
    messages = [_without(placeholder, message) for message in messages]
    for given in messages, _after_tools(messages), _before_tools(messages):
        try:
            count = render(given).count(placeholder)
        except Exception:  # templates refuse some content by any error
            continue
        if count == len(found):
            break
        first = count if first is None else first
    else:
        if first is not None:
            roles = ", ".join(dict.fromkeys(m["role"] for m in messages if _has_parts(m)))
            raise RequestError(
                f"the rendered prompt has {first} places for pictures ({placeholder}), and "
                f"{len(found)} pictures are given, in messages of the roles {roles}"
            )
        given = messages  # the template refuses them all; rendering again says why
    # A chat format may have sorted the results of tools.
    contents = [m["content"] for m in given if _has_parts(m)]
    return given, [prepared[part["index"]] for c in contents for part in c if "index" in part]


def _has_parts(message: Message) -> bool:
    return isinstance(message.get("content"), list)


def _without(placeholder: str, value: Any) -> Any:
    """A value of JSON whose texts do not have the placeholder: a picture would take its place."""
    if isinstance(value, str):
        return value.replace(placeholder, f"{placeholder[0]} {placeholder[1:]}")
    if isinstance(value, Mapping):
        return {name: _without(placeholder, inner) for name, inner in value.items()}
    return [_without(placeholder, v) for v in value] if isinstance(value, list) else value


def _prepared(processor: Processor, where: str, source: str | bytes) -> Prepared:
    check_wanted()
    try:
        return processor.of(source)
    except RequestError as e:
        raise bad(where, f": {e}") from e


def _after_tools(messages: Sequence[Message]) -> list[Message]:
    """The messages with the pictures of tools in a user's message after the tools' messages."""
    moved: list[Message] = []
    waiting: list[dict[str, Any]] = []
    for message in messages:
        if message["role"] == "tool":
            message, own = _parted(message)
            waiting += own
        elif waiting and message["role"] == "user":
            message = {**message, "content": together(waiting, message["content"])}
            waiting = []
        elif waiting:
            moved.append({"role": "user", "content": waiting})
            waiting = []
        moved.append(message)
    return [*moved, {"role": "user", "content": waiting}] if waiting else moved


def _before_tools(messages: Sequence[Message]) -> list[Message]:
    """The messages with the pictures of tools in the user's message before: some templates refuse a
    user's message after a tool's."""
    moved: list[Message] = []
    user = -1
    for message in messages:
        if message["role"] == "user":
            user = len(moved)
        elif message["role"] == "tool" and user >= 0:
            message, own = _parted(message)
            content = together(moved[user]["content"], own) if own else moved[user]["content"]
            moved[user] = {**moved[user], "content": content}
        moved.append(message)
    return moved


def _parted(message: Message) -> tuple[Message, list[dict[str, Any]]]:
    """(A tool's message without its pictures, the pictures)."""
    content = message["content"]
    if isinstance(content, str):
        return message, []
    texts = [part["text"] for part in content if part["type"] == "text"]
    text = "\n".join(texts) or "The user's message has the picture."
    return {**message, "content": text}, [part for part in content if part["type"] == "image"]
