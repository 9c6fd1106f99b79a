"""Every sampling option that is served with a draft, in the real vLLM, against exact chances (`sampling_options.py`)."""

from pathlib import Path

import pytest
from sampling_options import CUTTING, NEUTRAL, cases
from test_engine import run_case

from hf_codraft.serving.sampling import SERVED

# About 500 normal scores at fixed seeds: one beyond 4.5 (7e-6 each) is a false alarm in 1 of 300 changes of the seeds.
MAX_Z = 4.5


@pytest.fixture(scope="module")
def results(tmp_path_factory) -> dict:
    return run_case(
        "options", tmp_path_factory.mktemp("options"), script=Path(__file__).with_name("sampling_cases.py")
    )


def test_every_served_option_is_sampled():
    assert {*CUTTING, *NEUTRAL} - {"all together"} == SERVED.keys()


@pytest.mark.slow
@pytest.mark.parametrize("draft", ["equal", "other"])
@pytest.mark.parametrize("case", cases())
def test_sampling_option_is_lossless(results, case, draft):
    """Lengths, tokens at every position and the first three together; log-probs as TRL trains with them."""
    result = results["options"][f"{case}, {draft} draft"]
    assert result["impossible"] == []
    assert {view: z for view, z in result["z"].items() if abs(z) > MAX_Z} == {}
    assert result["logprob_difference"] < 1e-4  # fp32
    assert sum(result["histogram"]) > 0


@pytest.mark.slow
def test_drafts_are_what_they_are_meant_to_be(results):
    """The equal draft is always accepted, the other one sometimes."""
    equal, other = (results["options"][f"ignore_eos 0, {name} draft"]["histogram"] for name in ("equal", "other"))
    assert equal[:3] == [0, 0, 0]
    assert min(other[:4]) > 0


@pytest.mark.slow
def test_trl_asks_for_what_was_checked_and_reads_completions_that_end_at_a_stop_string(results):
    through = results["trl"]
    assert through["as told"] == [True]
    assert all(through["lengths"])
    assert through["impossible"] == []
    assert max(map(abs, through["z"].values())) < MAX_Z
    assert through["draft_temperature"] == 0.5
