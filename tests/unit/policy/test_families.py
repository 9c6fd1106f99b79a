"""Every causal LM of the installed transformers: it trains with a draft that sees what it computes, or it is refused."""

import compatibility
import policy_families
import pytest


@pytest.fixture(scope="module")
def outcomes() -> dict[str, policy_families.Outcome]:
    return {outcome.family: outcome for outcome in policy_families.try_all()}


@pytest.mark.slow
@pytest.mark.filterwarnings("ignore")
@pytest.mark.timeout(900)
def test_every_family_trains_on_its_own_logits_or_is_refused_by_name(outcomes):
    # The comparisons themselves are in `try_family`.
    assert set(outcomes) | set(policy_families.UNBUILT) == set(policy_families.FAMILIES)
    trains = {family for family, outcome in outcomes.items() if not outcome.refusal}
    assert trains >= {
        "llama", "qwen2", "qwen3", "qwen3_moe", "qwen3_next", "qwen3_5_text", "mistral", "mixtral", "gemma", "gemma2",
        "gemma3_text", "gemma4_text", "granite", "cohere", "olmo", "olmo2", "starcoder2", "phi3", "glm4", "gpt_oss",
        "deepseek_v3", "falcon_h1", "minicpm3", "hyperclovax", "nemotron", "smollm3",
    }  # fmt: skip
    refused = {"gpt2", "bloom", "opt", "mamba", "bert", "gemma3n_text", "deepseek_v4", "modernbert-decoder"}
    assert not trains & refused


@pytest.mark.slow
@pytest.mark.filterwarnings("ignore")
@pytest.mark.timeout(900)
def test_the_table_of_policies_is_current(outcomes):
    written = policy_families.table(list(outcomes.values()), policy_families.drafts_in_engine)
    assert compatibility.read("policies") == written, "run python tests/compatibility.py policies"
