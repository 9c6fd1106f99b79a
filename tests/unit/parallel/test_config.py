"""Which layouts are accepted, and what the launcher's environment turns into."""

import pytest
from accelerate.utils import TorchContextParallelConfig

from hf_codraft.parallel.config import CoDraftParallelismConfig


@pytest.fixture(autouse=True)
def _clean_environment(monkeypatch):
    for axis in ("PP", "DP_REPLICATE", "DP_SHARD", "CP", "TP", "SP"):
        monkeypatch.delenv(f"PARALLELISM_CONFIG_{axis}_SIZE", raising=False)


def test_sizes_come_from_the_launchers_environment(monkeypatch):
    monkeypatch.setenv("PARALLELISM_CONFIG_CP_SIZE", "2")
    monkeypatch.setenv("PARALLELISM_CONFIG_DP_REPLICATE_SIZE", "3")
    monkeypatch.setenv("PARALLELISM_CONFIG_CP_BACKEND", "torch")
    layout = CoDraftParallelismConfig()
    assert (layout.cp_size, layout.dp_replicate_size, layout.pp_size, layout.total_size) == (2, 3, 1, 6)
    monkeypatch.setenv("PARALLELISM_CONFIG_CP_SIZE", "1")
    monkeypatch.setenv("PARALLELISM_CONFIG_PP_SIZE", "4")
    assert CoDraftParallelismConfig().total_size == 12
    assert CoDraftParallelismConfig(pp_size=2, dp_replicate_size=1).total_size == 2


def test_axes_are_ordered_with_the_pipeline_outermost_and_accelerates_own_cp_stays_off():
    layout = CoDraftParallelismConfig(cp_size=2, dp_shard_size=2, dp_replicate_size=3)
    assert layout.active_mesh_dims == ["dp_replicate", "dp_shard", "cp"]
    assert layout.dp_cp_dim_names == ["dp_replicate", "dp_shard", "cp"]
    assert layout.dp_shard_cp_dim_names == ["dp_shard", "cp"]
    assert (layout.data_parallel_size, layout.non_data_parallel_size) == (6, 2)
    assert not layout.cp_enabled and layout.cp_handler is None
    pipeline = CoDraftParallelismConfig(pp_size=2, dp_replicate_size=2)
    assert pipeline.active_mesh_dims == ["pp", "dp_replicate"]
    assert pipeline.dp_cp_dim_names == ["dp_replicate"] and pipeline.non_data_parallel_size == 2


@pytest.mark.parametrize(
    ("arguments", "words"),
    [
        ({"cp_size": 2, "cp_handler": TorchContextParallelConfig()}, "cp_handler"),
        ({"sp_size": 2}, "sp_size"),
        ({"pp_size": 2, "tp_size": 2}, "tp_size"),
        ({"cp_size": 2, "tp_size": 2}, "tp_size"),
        ({"dp_replicate_size": 2, "tp_size": 2}, "tp_size"),
        ({"pp_size": 2, "cp_size": 2}, "cp_size"),
        ({"pp_size": 2, "dp_shard_size": 2}, "dp_shard_size"),
        ({"pp_size": 0}, "pp_size"),
        ({"dp_replicate_size": 0}, "dp_replicate_size"),
        ({"cp_size": 0}, "cp_size"),
    ],
)
def test_layouts_that_cannot_work_are_refused(arguments, words):
    with pytest.raises(ValueError, match=words):
        CoDraftParallelismConfig(**arguments)


def test_a_layout_of_more_ranks_than_there_are_is_refused():
    with pytest.raises(ValueError, match="makes 2 ranks, but 1 were launched"):
        CoDraftParallelismConfig(cp_size=2).build_device_mesh("cpu")
    assert CoDraftParallelismConfig().build_device_mesh("cpu") is None
