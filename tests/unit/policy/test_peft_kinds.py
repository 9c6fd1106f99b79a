"""Every kind of adapter of the installed PEFT: right taps and teacher, or refused by name."""

import compatibility
import peft_kinds
import pytest
from peft import PeftType


@pytest.fixture(scope="module")
def outcomes() -> list[peft_kinds.Outcome]:
    return peft_kinds.try_all()


@pytest.mark.slow
def test_every_kind_of_adapter_trains_on_its_own_states_or_is_refused_by_name(outcomes):
    # The comparisons themselves are in `try_kind`.
    assert {outcome.kind for outcome in outcomes} | set(peft_kinds.UNBUILT) == {kind.value for kind in PeftType}
    trains = {outcome.kind for outcome in outcomes if outcome.place == "attention" and not outcome.refusal}
    assert trains >= {
        "LORA",
        "ADALORA",
        "IA3",
        "OFT",
        "BOFT",
        "VERA",
        "PREFIX_TUNING",
        "LN_TUNING",
        "TRAINABLE_TOKENS",
    }
    assert not trains & {"PROMPT_TUNING", "P_TUNING", "MULTITASK_PROMPT_TUNING", "CPT"}
    assert {outcome.kind for outcome in outcomes if outcome.place == "head" and not outcome.refusal} >= {"LORA"}


@pytest.mark.parametrize("kind", [PeftType.PROMPT_TUNING, PeftType.P_TUNING])
def test_virtual_tokens_are_refused_with_their_number(kind):
    outcome = peft_kinds.try_kind(kind, "attention")
    assert f"inside PEFT {kind.value}) adds 4 virtual tokens to every row" in outcome.refusal


@pytest.mark.slow
def test_the_table_of_adapters_is_current(outcomes):
    assert compatibility.read("peft") == peft_kinds.table(outcomes), "run python tests/compatibility.py peft"
