"""Formats statistics for people."""

from collections.abc import Mapping

from vllm_metal_lite.cli.conversation import Turn


def turn_line(turn: Turn, max_model_len: int) -> str:
    """One line about an answer: tokens, speed, and whether a limit cut the answer."""
    output = turn.output
    answer = output.outputs[0]
    prompt, new = len(output.prompt_token_ids), len(answer.token_ids)
    parts = [f"{prompt} prompt tokens, {output.num_cached_tokens} of them cached", f"{new} new"]
    later = turn.seconds - turn.seconds_to_first
    if new > 1 and later > 0:
        parts.append(f"{(new - 1) / later:.1f} tokens/s")
    if new:
        parts.append(f"first after {turn.seconds_to_first:.2f} s")
    line = f"[{', '.join(parts)}]"
    if is_cut(turn):
        full = fills_context(turn, max_model_len)
        why = f"the context of {max_model_len} tokens is full (/reset)" if full else "max_tokens"
        line += f" cut: {why}"
    elif answer.finish_reason != "stop":
        line += " stopped" if turn.kept else " stopped before its first token, message taken back"
    return line


def is_cut(turn: Turn) -> bool:
    """Whether a limit ended the answer."""
    return turn.output.outputs[0].finish_reason == "length"


def fills_context(turn: Turn, max_model_len: int) -> bool:
    """Whether there is no room for one more token."""
    output = turn.output
    return len(output.prompt_token_ids) + len(output.outputs[0].token_ids) >= max_model_len


def engine_stats(m: Mapping[str, int], block_size: int, attention: str) -> str:
    """LLMEngine.metrics() for people.  attention: the attention path, and why."""
    asked, hit = m["prefix_cache_queried_tokens"], m["prefix_cache_hit_tokens"]
    return (
        f"steps     {m['steps']:,}: {m['prefill_tokens']:,} prompt tokens computed, "
        f"{m['decode_tokens']:,} decoded\n"
        f"cache     {hit:,} of {asked:,} prompt tokens found ({_percent(hit, asked)})\n"
        f"preempted {m['preemptions']:,} times, {m['recomputed_tokens']:,} tokens computed again\n"
        f"blocks    {m['blocks_total']:,} of {block_size} tokens: {m['blocks_free']:,} free, "
        f"{m['blocks_cached']:,} cached, {m['blocks_owned']:,} owned "
        f"(at most {m['blocks_peak_owned']:,})\n"
        f"requests  {m['requests_running']:,} running, {m['requests_waiting']:,} waiting\n"
        f"attention {attention}"
    )


def _percent(part: int, whole: int) -> str:
    return f"{100 * part / whole:.0f} %" if whole else "-"
