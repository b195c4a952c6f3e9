"""tools/count/recurrent.py counts what mlx-lm launches on Metal for a recurrent layer."""

import pytest

from tools.count import recurrent as count_recurrent


def rows_of(capsys, *arguments):
    """[launches, MiB of weights, of states, of the rest] of mlx-lm, by model and step."""
    count_recurrent.main(list(arguments))
    rows = [line.split("|")[1:-1] for line in capsys.readouterr().out.splitlines()[2:]]
    return {(r[0].strip(), r[1].split()[0]): [float(cell) for cell in r[3:]] for r in rows}


def test_a_decode_moves_states_in_and_out_once(capsys):
    rows = rows_of(capsys, "--batch", "8")
    recurrent = 2 * 8 * 4 * 32 * 128 * 128 / 2**20
    convolution = 2 * 8 * 2 * 3 * 8192 / 2**20
    assert rows["qwen3.5-4b", "decode"][2] == pytest.approx(recurrent + convolution, abs=0.05)
    recurrent = 2 * 8 * 4 * 112 * 64 * 128 / 2**20
    assert rows["nemotron-h-4b", "decode"][2] > recurrent


def test_launches_of_its_metal_kernels(capsys):
    rows = rows_of(capsys, "--batch", "8", "--prompt", "64")
    assert rows["qwen3.5-4b", "prompt"][0] == rows["qwen3.5-4b", "decode"][0]  # one kernel for both
    assert rows["nemotron-h-4b", "prompt"][0] > 2 * rows["nemotron-h-4b", "decode"][0]  # operations


def test_weights_in_4_bits(capsys):
    whole, few = (rows_of(capsys, *bits)["lfm2-1.2b", "decode"] for bits in ((), ("--bits", "4")))
    assert few[0] == whole[0]
    assert few[1] == pytest.approx(whole[1] * 4.5 / 16, rel=0.01)


def test_ours_is_what_one_more_layer_adds(capsys):
    """The weights are the same on both sides; ours takes a norm and a sum in one launch."""
    count_recurrent.main(["--ours", "--models", "lfm2-tiny", "--batch", "4", "--prompt", "32"])
    rows = [line.split("|")[1:-1] for line in capsys.readouterr().out.splitlines()[2:]]
    found = {(r[2].strip(), r[1].split()[0]): [float(cell) for cell in r[3:]] for r in rows}
    for step in ("decode", "prompt"):
        assert found["ours", step][1] == found["mlx-lm", step][1]
        assert 0 < found["ours", step][0] < found["mlx-lm", step][0]
