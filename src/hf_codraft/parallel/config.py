"""How ranks are laid out: accelerate's `ParallelismConfig` with a pipeline axis and our own context parallelism."""

import os
from dataclasses import dataclass
from typing import TYPE_CHECKING

from accelerate.utils import DistributedType, ParallelismConfig
from torch import distributed as dist
from torch.distributed.device_mesh import DeviceMesh, init_device_mesh

if TYPE_CHECKING:
    from accelerate import Accelerator

MESH_ORDER = ("pp", "dp_replicate", "dp_shard", "cp", "tp")  # outermost first


@dataclass(repr=False)
class CoDraftParallelismConfig(ParallelismConfig):
    """Sizes of the axes of the device mesh, outermost first: pp, dp_replicate, dp_shard, cp, tp.

    Whatever is not given is read from the variables that `accelerate launch` sets (`PARALLELISM_CONFIG_CP_SIZE` and so
    on; `PARALLELISM_CONFIG_PP_SIZE` is ours, set it yourself). With all sizes 1 on several ranks, all of them are data
    parallel, as in accelerate.

    Context parallelism is that of `hf_codraft.attention`, chosen by the model's `attn_implementation`. accelerate's own
    (torch's `context_parallel`) stays off: `cp_enabled`, which switches it on and demands FSDP2 and a GPU, is false
    whatever `cp_size` is. So `cp_size > 1` works with DDP and on CPU ranks. `cp_backend` and the communication strategy,
    which the launcher always sets, have no effect.

    Args:
        pp_size (`int`, *optional*): ranks of one pipeline.
        dp_replicate_size, dp_shard_size, cp_size, tp_size (`int`, *optional*): as in accelerate; `dp_replicate_size`
            alone (DDP) may be combined with `cp_size` and `pp_size`.

    Raises:
        ValueError: for sizes below 1 and combinations that don't work.
    """

    pp_size: int | None = None

    def __post_init__(self) -> None:
        if self.cp_handler is not None:
            raise ValueError(
                f"cp_handler ({type(self.cp_handler).__name__}) configures accelerate's own context parallelism, which this "
                "config replaces; leave it out."
            )
        if self.pp_size is None:
            self.pp_size = int(os.environ.get("PARALLELISM_CONFIG_PP_SIZE", "1"))
        if self.dp_replicate_size is None:
            self.dp_replicate_size = int(os.environ.get("PARALLELISM_CONFIG_DP_REPLICATE_SIZE", "1"))
        # accelerate refuses DDP together with cp; for ours DDP is the common case, so it is checked below instead.
        num_replicas, self.dp_replicate_size = self.dp_replicate_size, 1
        super().__post_init__()
        self.cp_handler = None
        self.joint_meshes: dict[str, DeviceMesh] = {}
        self._set_size("dp_replicate", num_replicas)
        self._sizes["pp"] = self.pp_size
        self._check_sizes()

    def _check_sizes(self) -> None:
        for name in ("pp_size", "dp_replicate_size"):
            if getattr(self, name) < 1:
                raise ValueError(f"{name} ({getattr(self, name)}) must be at least 1.")
        if self.sp_size > 1:
            raise ValueError(
                f"sp_size ({self.sp_size}) must be 1: sequence parallelism is DeepSpeed's own. Set cp_size for ours."
            )
        if self.tp_size > 1 and self.pp_size * self.cp_size * self.dp_replicate_size > 1:
            raise ValueError(
                f"tp_size ({self.tp_size}) can't be combined with pp_size ({self.pp_size}), cp_size ({self.cp_size}) or "
                f"dp_replicate_size ({self.dp_replicate_size}); set tp_size=1."
            )
        if self.pp_size > 1 and self.dp_shard_size * self.cp_size > 1:
            raise ValueError(
                f"pp_size ({self.pp_size}) can't be combined with dp_shard_size ({self.dp_shard_size}) or cp_size "
                f"({self.cp_size}): stages are replicated whole, and each sees whole sequences. Use dp_replicate_size "
                "for the replicas of a pipeline."
            )

    def __repr__(self) -> str:
        sizes = ", ".join(f"{axis}_size={self._sizes[axis]}" for axis in MESH_ORDER)
        return f"{type(self).__name__}({sizes})"

    @property
    def cp_enabled(self) -> bool:
        """False: says whether *accelerate's* context parallelism is on."""
        return False

    @property
    def total_size(self) -> int:
        return self.pp_size * super().total_size

    @property
    def non_data_parallel_size(self) -> int:
        return self.pp_size * super().non_data_parallel_size

    @property
    def active_mesh_dims(self) -> list[str]:
        return [axis for axis in MESH_ORDER if self._sizes[axis] > 1]

    @property
    def non_dp_dim_names(self) -> list[str]:
        return [axis for axis in ("pp", "tp", "cp") if self._sizes[axis] > 1]

    @property
    def dp_shard_cp_dim_names(self) -> list[str]:
        return [axis for axis in ("dp_shard", "cp") if self._sizes[axis] > 1]

    @property
    def dp_cp_dim_names(self) -> list[str]:
        return [axis for axis in ("dp_replicate", "dp_shard", "cp") if self._sizes[axis] > 1]

    def build_device_mesh(self, device_type: str) -> DeviceMesh | None:
        """The mesh of all ranks, with the joint axes `dp`, `dp_shard_cp` and `dp_cp`; `None` for one rank.

        Raises:
            ValueError: if the sizes don't multiply to the number of ranks.
        """
        num_ranks = dist.get_world_size() if dist.is_initialized() else 1
        if self.total_size == 1:
            self._set_size("dp_replicate", num_ranks)
        if self.total_size != num_ranks:
            raise ValueError(
                f"{self!r} makes {self.total_size} ranks, but {num_ranks} were launched. Set dp_replicate_size to "
                f"{num_ranks} divided by the other sizes, or launch {self.total_size}."
            )
        if num_ranks == 1:
            return None
        axes = self.active_mesh_dims
        mesh = init_device_mesh(device_type, tuple(self._sizes[axis] for axis in axes), mesh_dim_names=tuple(axes))
        joint = {"dp": self.dp_dim_names, "dp_shard_cp": self.dp_shard_cp_dim_names, "dp_cp": self.dp_cp_dim_names}
        for name, parts in joint.items():
            if parts:
                self.joint_meshes[name] = mesh[tuple(parts)]._flatten(name)
        return mesh

    def _validate_accelerator(self, accelerator: "Accelerator") -> None:
        """Replaces accelerate's check, which refuses CPU ranks; sizes were compared when the mesh was built.

        Raises:
            ValueError: for backends that wrap or shard the model in a way that the axes can't be combined with.
        """
        if self.total_size != accelerator.state.num_processes:
            raise ValueError(
                f"{self!r} makes {self.total_size} ranks, but {accelerator.state.num_processes} were launched."
            )
        kind = accelerator.distributed_type
        refused = {DistributedType.DEEPSPEED, DistributedType.MEGATRON_LM, DistributedType.XLA}
        if self.pp_size > 1:
            refused.add(DistributedType.FSDP)
        if self.pp_size * self.cp_size > 1 and kind in refused:
            raise ValueError(
                f"pp_size ({self.pp_size}) and cp_size ({self.cp_size}) can't be combined with {kind.value}; cp works with "
                "DDP and FSDP2, pp with neither wrapper. Launch without it."
            )
        if self.cp_size > 1 and kind == DistributedType.FSDP and not accelerator.is_fsdp2:
            raise ValueError(f"cp_size ({self.cp_size}) needs fsdp_version=2 where FSDP is used, or DDP.")
