"""Grammars compiled by llguidance, within limits of time, memory and stack."""

import json
import re
import threading
from collections.abc import Callable, Mapping
from concurrent.futures import Future
from contextlib import suppress
from dataclasses import replace
from functools import lru_cache
from time import monotonic
from typing import TypeVar
from weakref import WeakValueDictionary

from llguidance import LLMatcher, LLParserLimits, LLTokenizer
from llguidance.gbnf_to_lark import is_lark_syntax

from vllm_metal_lite.errors import BusyError, one_line
from vllm_metal_lite.structured_outputs.grammar_text import TOKEN, GrammarError, grammar_text
from vllm_metal_lite.structured_outputs.json_schema import locate
from vllm_metal_lite.structured_params import StructuredOutputsParams

T = TypeVar("T")

# Intersections of regexes may take minutes.
MAX_SECONDS = 5
_MAX_THREADS = 8
# llguidance recurses from rule to rule and from $ref to $ref.  A grammar of MAX_FORM that does
# nothing else overflows a stack of 64 MB, and an overflow ends the process.
_STACK_BYTES = 512 << 20
_LIMITS = LLParserLimits(max_grammar_size=20_000, max_lexer_states=50_000, verbose_errors=False)
# This number of grammars stay compiled.  One may hold 35 MiB, however short its text is.
_MAX_KEPT = 8
_PLACE = re.compile(r"^at \d+\(\d+\): ")  # in the grammar's text, which this package wrote
_BYTES = LLTokenizer("byte")
_stack_size_lock, _free_threads = threading.Lock(), threading.Semaphore(_MAX_THREADS)


class Compiler:
    """Compiles grammars for one tokenizer; keeps those in use and the last few.  Thread-safe."""

    def __init__(self, tokenizer: LLTokenizer, marks: Mapping[str, int] | None = None) -> None:
        """marks: ids of the tokens that a grammar may name, such as `<think>`."""
        self.tokenizer, self._marks = tokenizer, marks or {}
        # Forms that are being compiled, and compiled ones that a caller or `_last` holds.
        self._compiled: WeakValueDictionary[StructuredOutputsParams, Future[LLMatcher]] = (
            WeakValueDictionary()
        )
        self._last: list[Future[LLMatcher]] = []
        self._lock = threading.Lock()

    def compile(self, params: StructuredOutputsParams) -> Future[LLMatcher]:
        """A compiled matcher; each answer needs a copy.  A form is compiled only once while a
        caller holds its Future.  Raises GrammarError and BusyError."""
        with self._lock:
            found = self._compiled.get(params)
            compiled = self._compiled[params] = found or Future()
        if found is None:
            try:
                named = _by_id(params, lambda name: self._marks.get(name, name))
                compiled.set_result(_compile(named, self.tokenizer))
            except BaseException as e:
                del self._compiled[params]
                compiled.set_exception(e)
        compiled.result()
        with self._lock:
            self._last = [*(c for c in self._last if c is not compiled), compiled][-_MAX_KEPT:]
        return compiled


def _compile(params: StructuredOutputsParams, tokenizer: LLTokenizer) -> LLMatcher:
    """Compile a form.  Raises GrammarError, which names the place, and BusyError."""
    if params.whitespace_pattern is not None:
        try:
            _compile(StructuredOutputsParams(regex=params.whitespace_pattern), tokenizer)
        except GrammarError as e:
            raise GrammarError(params.kind, "", f"whitespace_pattern: {e.why}") from None
    end, grammar = monotonic() + MAX_SECONDS, grammar_text(params)
    matcher = _on_deep_stack(params.kind, lambda: _new_matcher(grammar, tokenizer))
    if not matcher.is_error():
        return matcher
    error = matcher.get_error()

    def error_of(schema: dict[str, object]) -> str | None:
        if monotonic() > end:
            raise TimeoutError  # no caller waits any longer
        part = _new_matcher(grammar_text(replace(params, json=schema)), tokenizer)
        return part.get_error() if part.is_error() else None

    place = ""
    if params.kind == "json":
        schema = json.loads(str(params.json))
        with suppress(GrammarError, BusyError):
            left = end - monotonic()
            place = _on_deep_stack(params.kind, lambda: locate(schema, error_of), left)
    why = readable_error(error)
    if params.kind != "grammar":
        why = _PLACE.sub("", why)
    raise GrammarError(params.kind, place, why)


@lru_cache(256)  # remembers valid forms, keeps no compiled grammar
def check(params: StructuredOutputsParams) -> None:
    """Raise GrammarError for a form that no model can use, and BusyError if no thread is free.

    Needs no tokenizer: token 0 replaces the tokens in a grammar, which a model may lack.
    """
    _compile(_by_id(params, lambda name: 0), _BYTES)


def _by_id(
    params: StructuredOutputsParams, id_of: Callable[[str], int | str]
) -> StructuredOutputsParams:
    """The form with the ids of the tokens that a grammar names; id_of: returns the name itself if
    no token has that name."""

    def by_id(found: re.Match[str]) -> str:
        i = id_of(found[1]) if found[1] else ""
        return f"<[{i}]>" if isinstance(i, int) else found[0]

    if params.grammar is None or not is_lark_syntax(params.grammar):
        return params
    return replace(params, grammar=TOKEN.sub(by_id, params.grammar))


def _new_matcher(grammar: str, tokenizer: LLTokenizer) -> LLMatcher:
    matcher = LLMatcher(tokenizer, grammar, log_level=0, limits=_LIMITS)
    if not matcher.is_error():
        matcher.compute_bitmask()  # some grammars fail at their first token
    return matcher


def readable_error(error: str) -> str:
    """An error of llguidance in one line."""
    if error.startswith("NoExtension"):
        return "no text fits"
    error = error.removesuffix("<non-verbose/>")
    error = error.replace("Unimplemented keys", "keywords that are not supported")
    # Errors of regexes point at a column, others at a line, which one line cannot do.
    error = re.sub(r"regex parse error:.*\n *error: ([^\n]*).*", r"\1", error, flags=re.DOTALL)
    error = re.sub(r"\n *\d+ \| .*", "", error, flags=re.DOTALL)
    if error.startswith("oneOf constraints"):  # llguidance names an option of its own
        error = "oneOf needs parts that exclude each other by a type or a constant; or use anyOf"
    return one_line(ValueError(error))


def _on_deep_stack(kind: str, work: Callable[[], T], seconds: float | None = None) -> T:
    """The result of `work`, run on a thread with much stack.  Raises GrammarError if `work` takes
    too long (MAX_SECONDS, or `seconds`), BusyError if no thread is free, and the errors of `work`.

    A thread that takes too long cannot be stopped.  It continues without the GIL, and counts as one
    of _MAX_THREADS until it is done.
    """
    result: Future[T] = Future()

    def run() -> None:
        try:
            result.set_result(work())
        except BaseException as e:
            result.set_exception(e)
        finally:
            _free_threads.release()

    seconds = MAX_SECONDS if seconds is None else max(0, seconds)
    if not _free_threads.acquire(timeout=seconds):
        raise BusyError("other grammars are being compiled; try again")
    with _stack_size_lock:
        before = threading.stack_size(_STACK_BYTES)
        try:
            threading.Thread(target=run, daemon=True).start()
        except BaseException:
            _free_threads.release()
            raise
        finally:
            threading.stack_size(before)
    try:
        return result.result(seconds)
    except TimeoutError:
        why = f"it takes longer than {MAX_SECONDS} seconds to compile"
        raise GrammarError(kind, "", why) from None
