"""Rows that come near to the engine's length limit."""

from hf_codraft.serving import engine


def test_rows_within_the_drafted_tokens_of_the_limit_are_told_of_once(caplog):
    engine._warn_once.cache_clear()
    engine.warn_near_limit(61, 64, 3)
    assert not caplog.records
    for longest in (62, 64):
        engine.warn_near_limit(longest, 64, 3)
    (record,) = caplog.records
    assert "of vllm_max_model_length (64)" in record.message and "max_completion_length + 3" in record.message
