"""Accelerators whose groups come from one device mesh: for context parallelism, and for pipelines."""

from collections.abc import Callable, Iterable
from contextlib import AbstractContextManager, nullcontext
from pathlib import Path
from typing import Any, NoReturn, TypeVar

import torch
from accelerate import Accelerator
from accelerate.scheduler import AcceleratedScheduler
from accelerate.utils import DataLoaderConfiguration
from accelerate.utils.operations import recursively_apply
from torch import distributed as dist
from torch import nn

from hf_codraft.parallel.checkpoint import (
    load_training_state,
    random_state,
    save_pretrained_stages,
    save_training_state,
    set_random_state,
    together,
)
from hf_codraft.parallel.config import CoDraftParallelismConfig
from hf_codraft.parallel.stages import PolicyStage
from hf_codraft.taps.peers import Peers

T = TypeVar("T")


class DataParallelScheduler(AcceleratedScheduler):
    """accelerate's scheduler, which makes one step per data-parallel process, counting those instead of all ranks.

    Args:
        scheduler, optimizers: as in accelerate.
        num_steps (`int`): scheduler steps per optimizer step.
    """

    def __init__(self, scheduler, optimizers, *, num_steps: int):
        super().__init__(scheduler, optimizers, split_batches=True)
        self.num_steps = num_steps

    def step(self, *args, **kwargs) -> None:
        is_last = self.gradient_state.sync_gradients
        has_end = is_last and hasattr(self.scheduler, "total_steps")
        for _ in range(self.num_steps if is_last else 1):
            # As in accelerate: a OneCycleLR may end between the steps of one call, and refuses to go on.
            if has_end and self.scheduler._step_count > self.scheduler.total_steps:
                return
            super().step(*args, **kwargs)


class MeshAccelerator(Accelerator):
    """An `Accelerator` laid out by [`CoDraftParallelismConfig`]; base of the two below.

    Args:
        parallelism_config ([`CoDraftParallelismConfig`], *optional*): by default made from the launcher's environment.
        dataloader_config (`DataLoaderConfiguration`, *optional*): as in accelerate, without `dispatch_batches`.
        **kwargs: as in `Accelerator`.

    Raises:
        ValueError: for another kind of config, or `dispatch_batches=True`.
        RuntimeError: if an `Accelerator` with another layout was made before in this process.
    """

    def __init__(
        self,
        *,
        parallelism_config: CoDraftParallelismConfig | None = None,
        dataloader_config: DataLoaderConfiguration | None = None,
        **kwargs: Any,
    ):
        layout = CoDraftParallelismConfig() if parallelism_config is None else parallelism_config
        if not isinstance(layout, CoDraftParallelismConfig):
            raise ValueError(f"parallelism_config ({type(layout).__name__}) must be a CoDraftParallelismConfig.")
        dataloader_config = dataloader_config or DataLoaderConfiguration()
        if dataloader_config.dispatch_batches:
            raise ValueError(
                "dispatch_batches=True hands a different slice to every rank, peers of one data-parallel group included; "
                "leave it out."
            )
        # accelerate would choose to dispatch for an IterableDataset.
        dataloader_config.dispatch_batches = False
        super().__init__(parallelism_config=layout, dataloader_config=dataloader_config, **kwargs)
        if self.parallelism_config is not layout:
            raise RuntimeError(
                "an Accelerator with another parallelism_config was made in this process before, and accelerate keeps the "
                f"first one. Make the {type(self).__name__} first, and once."
            )

    def axis_group(self, axis: str) -> dist.ProcessGroup | None:
        """This rank's group along a mesh axis (`pp`, `cp`, ..., or joint: `dp`, `dp_cp`); `None` where its size is 1."""
        layout = self.parallelism_config
        if axis in layout.joint_meshes:
            return layout.joint_meshes[axis].get_group()
        return self.torch_device_mesh[axis].get_group() if axis in layout.active_mesh_dims else None

    def axis_rank(self, axis: str) -> int:
        group = self.axis_group(axis)
        return 0 if group is None else dist.get_rank(group)

    def axis_size(self, axis: str) -> int:
        group = self.axis_group(axis)
        return 1 if group is None else group.size()

    def prepare_scheduler(self, scheduler):
        if isinstance(scheduler, AcceleratedScheduler) or self.split_batches or not self.step_scheduler_with_optimizer:
            return super().prepare_scheduler(scheduler)
        optimizers = [o for o in self._optimizers if o.optimizer is scheduler.optimizer] or self._optimizers
        prepared = DataParallelScheduler(scheduler, optimizers, num_steps=self.axis_size("dp"))
        self._schedulers.append(prepared)
        return prepared


class ContextParallelAccelerator(MeshAccelerator):
    """An `Accelerator` for sequences sharded over the `cp` axis; `prepare` and the training loop stay as they were.

    The model is wrapped in DDP over all ranks, so that gradients are averaged over data-parallel groups and over the
    shards of a sequence. A prepared data loader gives the same batch to all ranks of a `cp` group, and another one to
    each data-parallel group. `num_processes` still counts all ranks, and `gather` gathers from all of them.

    Since each rank's loss covers its own shard only, scale it with [`mean_loss`] before `backward`.

    Raises:
        ValueError: if the layout has a pipeline axis, and as in [`MeshAccelerator`].
    """

    def __init__(self, **kwargs: Any):
        super().__init__(**kwargs)
        if self.parallelism_config.pp_size > 1:
            raise ValueError(
                f"pp_size ({self.parallelism_config.pp_size}) must be 1 here; use PipelineAccelerator for pipelines."
            )

    @property
    def context_parallel_rank(self) -> int:
        return self.axis_rank("cp")

    def global_sum(self, count: torch.Tensor) -> torch.Tensor:
        """The sum of a tensor over all ranks that gradients are averaged over (data-parallel groups and shards)."""
        count, group = count.detach().clone(), self.axis_group("dp_cp")
        if group is not None:
            dist.all_reduce(count, group=group)
        return count

    def mean_loss(self, local_sum: torch.Tensor, global_count: torch.Tensor | float) -> torch.Tensor:
        """The loss to call `accelerator.backward` with, so that the gradient is that of the mean over all items.

        `local_sum / global_count`, times the number of ranks whose gradients DDP averages, times the accumulation steps
        that `backward` divides by.

        Args:
            local_sum (`torch.Tensor` of shape `()`): sum of this rank's terms; 0 (with a graph) where it has none.
            global_count (`torch.Tensor` or `float`): items on all ranks, over all microbatches of the optimizer step;
                see [`global_sum`]. Where there is none at all, the loss and its gradient are 0.
        """
        count = torch.as_tensor(global_count, device=local_sum.device)
        count = torch.where(count == 0, torch.ones_like(count), count)
        return local_sum * (self.axis_size("dp_cp") * self.gradient_accumulation_steps) / count


class PipelineAccelerator(MeshAccelerator):
    """An `Accelerator` that shows the ranks of one pipeline as one data-parallel process.

    `process_index`, `num_processes`, data loaders, `gather`, `reduce` and their like know the data-parallel replicas
    only: rank r of the pipeline of one replica talks to rank r of the others. All ranks of a pipeline make the same calls.
    What is done once for all (`is_main_process`, `is_last_process`, trackers) is done by one rank of all, and
    `wait_for_everyone` waits for all ranks.

    Models stay unwrapped. After the backward of the last microbatch call [`reduce_gradients`], then `clip_grad_norm_`.

    All ranks make it at the same time. Where a rank dies, the methods that talk to it raise [`PeerLost`], which names it.

    accelerate's functions of the same names (`accelerate.utils.gather_object`, `set_seed(device_specific=True)`) see all
    ranks; use the methods.

    Raises:
        ValueError: for mixed precision, which would wrap the model, and as in [`MeshAccelerator`].
    """

    def __init__(self, **kwargs: Any):
        super().__init__(**kwargs)
        self._stages: list[PolicyStage] = []
        if self.mixed_precision != "no":
            raise ValueError(
                f"mixed_precision ({self.mixed_precision!r}) must be 'no': stages are not wrapped in autocast. Load them in "
                "the dtype to train in (load_stage(dtype=torch.bfloat16))."
            )
        self._all_ranks = None if self.torch_device_mesh is None else dist.group.WORLD
        self._peers = None if self._all_ranks is None else Peers(self._all_ranks)

    def _naming(self, what: str) -> AbstractContextManager[None]:
        return nullcontext() if self._peers is None else self._peers.naming(what)

    def wait_for_everyone(self) -> None:
        with self._naming("waiting for everyone"):
            super().wait_for_everyone()

    def end_training(self) -> None:
        super().end_training()
        if self._peers is not None:
            self._peers.close()

    # How a replica is seen

    @property
    def process_index(self) -> int:
        return self.axis_rank("dp")

    @property
    def num_processes(self) -> int:
        return self.axis_size("dp")

    @property
    def is_last_process(self) -> bool:
        return self.state.is_last_process

    @property
    def pipeline_parallel_rank(self) -> int:
        return self.axis_rank("pp")

    @property
    def pipeline_group(self) -> dist.ProcessGroup | None:
        """The ranks of this replica's pipeline, in order; `None` for one."""
        return self.axis_group("pp")

    def prepare_model(self, model: nn.Module, device_placement: bool | None = None, evaluation_mode: bool = False):
        """Moves a model to the device and returns it; the [`PolicyStage`]s in it are noted for `clip_grad_norm_`."""
        if self.device_placement if device_placement is None else device_placement:
            model = model.to(self.device)
        if not evaluation_mode:
            known = {id(stage) for stage in self._stages}
            self._stages += [m for m in model.modules() if isinstance(m, PolicyStage) and id(m) not in known]
        if not any(model is known_model for known_model in self._models):
            self._models.append(model)
        return model

    # Gradients

    @torch.no_grad()
    def reduce_gradients(self, parameters: Iterable[nn.Parameter], *, bucket_bytes: int = 25 * 2**20) -> None:
        """Averages gradients over the replicas, in flat buckets.

        A gradient that only some replicas have counts as zero on the others; one that none has stays `None`.

        Both copies of a tied weight of prepared stages end with the same bits, so that they stay one: where a sum's order
        depends on a gradient's place in its bucket, they would drift apart.

        Args:
            parameters (iterable of `nn.Parameter`): this rank's, in the same order on all replicas; both copies of a tied
                weight, or none.
            bucket_bytes (`int`): bytes of gradients sent at once, at least.
        """
        group = self.axis_group("dp")
        trainable = [parameter for parameter in parameters if parameter.requires_grad]
        if group is None or not trainable:
            return
        with self._naming("averaging gradients"):
            self._average_gradients(trainable, group, bucket_bytes)
            self._share_tied_gradient(trainable)

    def _average_gradients(self, trainable: list[nn.Parameter], group: dist.ProcessGroup, bucket_bytes: int) -> None:
        has_gradient = torch.tensor([p.grad is not None for p in trainable], dtype=torch.int32, device=self.device)
        dist.all_reduce(has_gradient, dist.ReduceOp.MAX, group=group)
        bucket: list[torch.Tensor] = []
        for parameter, is_used in zip(trainable, has_gradient.tolist()):
            if not is_used:
                continue
            if parameter.grad is None:
                parameter.grad = torch.zeros_like(parameter)
            if bucket and bucket[0].dtype != parameter.grad.dtype:
                _average(bucket, group)
                bucket = []
            bucket.append(parameter.grad)
            if sum(gradient.nbytes for gradient in bucket) >= bucket_bytes:
                _average(bucket, group)
                bucket = []
        if bucket:
            _average(bucket, group)

    def _share_tied_gradient(self, reduced: list[nn.Parameter]) -> None:
        """Sends a tied weight's gradient from the first stage to the last."""
        group, ids = self.pipeline_group, {id(parameter) for parameter in reduced}
        for stage in self._stages:
            parameter = stage.tied_parameter
            if group is None or parameter is None or id(parameter) not in ids or parameter.grad is None:
                continue
            # Between steps of the pipeline nothing else is under way on its group.
            gradient = parameter.grad.contiguous()
            if stage.is_first:
                dist.send(gradient, group=group, group_dst=group.size() - 1)
            else:
                dist.recv(gradient, group=group, group_src=0)
                parameter.grad.copy_(gradient)

    def clip_grad_norm_(
        self, parameters: Iterable[nn.Parameter], max_norm: float, norm_type: float = 2
    ) -> torch.Tensor:
        """Clips by the norm over all stages, in which an embedding tied to the head counts once.

        Every rank of the pipeline must call it, with its own parameters, after the gradients are final.

        Raises:
            ValueError: if a pipeline is clipped by parameters of none of the prepared stages: whether one of them is the
                copy of a tied weight is not known.
        """
        parameters, norm_type = [p for p in parameters if p.grad is not None], float(norm_type)
        own = {id(parameter) for stage in self._stages for parameter in stage.parameters()}
        strangers = sum(id(parameter) not in own for parameter in parameters)
        if self.pipeline_group is not None and strangers:
            raise ValueError(
                f"parameters has {strangers} of {len(parameters)} that belong to no stage passed to prepare; prepare every "
                "PolicyStage, and clip a draft's gradients apart (torch.nn.utils.clip_grad_norm_)."
            )
        # Both copies of a tied weight hold the same summed gradient, so the last stage's does not count.
        copies = {id(stage.tied_parameter) for stage in self._stages if stage.is_last}
        counted = [p.grad for p in parameters if id(p) not in copies]
        norm = nn.utils.get_total_norm(counted, norm_type).to(self.device, torch.float64)
        group, is_max = self.pipeline_group, norm_type == float("inf")
        if group is not None:
            total = norm if is_max else norm**norm_type
            with self._naming("clipping gradients"):
                dist.all_reduce(total, dist.ReduceOp.MAX if is_max else dist.ReduceOp.SUM, group=group)
            norm = total if is_max else total ** (1.0 / norm_type)
        norm = norm.float()
        nn.utils.clip_grads_with_norm_(parameters, max_norm, norm)
        return norm

    # Talk between replicas

    def gather(self, tensor):
        """As in accelerate (joined along the first dimension, scalars as one element), over the replicas."""
        with self._naming("gathering"):
            return recursively_apply(self._gather_one, tensor, error_on_other_type=True)

    def _gather_one(self, tensor: torch.Tensor) -> torch.Tensor:
        group = self.axis_group("dp")
        if group is None:
            return tensor
        tensor = (tensor.clone()[None] if tensor.ndim == 0 else tensor).contiguous()
        parts = [torch.empty_like(tensor) for _ in range(group.size())]
        dist.all_gather(parts, tensor, group=group)
        return torch.cat(parts)

    def gather_object(self, objects: list) -> list:
        """The lists of all replicas joined; in place of `accelerate.utils.gather_object`."""
        group = self.axis_group("dp")
        if group is None:
            return objects
        parts: list = [None] * group.size()
        with self._naming("gathering objects"):
            dist.all_gather_object(parts, objects, group=group)
        return [item for part in parts for item in part]

    def gather_for_metrics(self, input_data, use_gather_object: bool = False):
        """As in accelerate: gathered, and cut to the dataset's length at the end of a data loader."""
        is_tensors = not use_gather_object
        if is_tensors:
            try:
                recursively_apply(lambda tensor: tensor, input_data, error_on_other_type=True)
            except TypeError:
                is_tensors = False
        data = self.gather(input_data) if is_tensors else self.gather_object(input_data)
        state = self.gradient_state
        if not state.end_of_dataloader or state.remainder <= 0:
            return data
        if not is_tensors:
            return data[: state.remainder]
        return recursively_apply(lambda tensor: tensor[: state.remainder], data)

    def reduce(self, tensor, reduction: str = "sum", scale: float = 1.0):
        """As in accelerate (`"sum"`, `"mean"`, `"max"` or `"none"`), over the replicas; `scale` is for XLA only."""
        if reduction not in ("sum", "mean", "max", "none"):
            raise ValueError(f"reduction ({reduction!r}) must be 'sum', 'mean', 'max' or 'none'.")
        group = self.axis_group("dp")

        def reduce_one(tensor: torch.Tensor) -> torch.Tensor:
            tensor = tensor.clone()
            if group is not None and reduction != "none":
                dist.all_reduce(tensor, dist.ReduceOp.MAX if reduction == "max" else dist.ReduceOp.SUM, group=group)
            return tensor / self.num_processes if reduction == "mean" else tensor

        with self._naming("reducing"):
            return recursively_apply(reduce_one, tensor, error_on_other_type=True)

    def pad_across_processes(self, tensor, dim: int = 0, pad_index: int = 0, pad_first: bool = False):
        """As in accelerate: padded along `dim` to the longest of the replicas."""

        def pad_one(tensor: torch.Tensor) -> torch.Tensor:
            if not -tensor.ndim <= dim < tensor.ndim:
                return tensor
            length = tensor.shape[dim]
            longest = int(self.gather(torch.tensor([length], device=tensor.device)).max())
            if longest == length:
                return tensor
            shape = list(tensor.shape)
            shape[dim] = longest - length
            padding = tensor.new_full(shape, pad_index)
            return torch.cat([padding, tensor] if pad_first else [tensor, padding], dim=dim)

        return recursively_apply(pad_one, tensor, error_on_other_type=True)

    def synchronize_random_state(self) -> None:
        """Gives all ranks of a pipeline the random state of its first one: Python's, NumPy's, torch's and the device's."""
        if self.pipeline_group is None:
            return
        states = [random_state()]
        with self._naming("sharing random states"):
            dist.broadcast_object_list(states, group=self.pipeline_group, group_src=0)
        set_random_state(states[0])

    # Checkpoints of the stages that were prepared; all ranks of all replicas call

    def save_pretrained(self, folder: str | Path, **kwargs: Any) -> None:
        """[`save_pretrained_stages`] by the first replica; the others wait, and raise where it fails."""

        def save() -> None:
            if self.process_index == 0:
                save_pretrained_stages(self._stages, self.pipeline_group, folder, **kwargs)

        self._with_files(f"saving {folder}", lambda: together(self._all_ranks, f"save {folder}", save))

    def save_training_state(self, folder: str | Path, **kwargs: Any) -> None:
        """[`save_training_state`] of the prepared stages, with the random states of all replicas."""
        self._with_files(f"saving {folder}", lambda: save_training_state(folder, **self._place(), **kwargs))

    def load_training_state(self, folder: str | Path, **kwargs: Any) -> dict[str, Any]:
        """[`load_training_state`] into the prepared stages."""
        return self._with_files(
            f"resuming from {folder}", lambda: load_training_state(folder, **self._place(), **kwargs)
        )

    def _with_files(self, what: str, action: Callable[[], T]) -> T:
        try:
            return action()
        except dist.DistError:  # a plain RuntimeError tells of a rank that lives, in words that may look like gloo's
            with self._naming(what):
                raise

    def _place(self) -> dict[str, Any]:
        rank = self.pipeline_parallel_rank
        return dict(group=self._all_ranks, stages=self._stages, replica=self.process_index, pipeline_rank=rank)

    # What would treat a stage as a whole model

    def get_state_dict(self, model, unwrap: bool = True) -> NoReturn:
        _refuse("get_state_dict", "iterate_full_weights or save_pretrained_stages")

    def save_model(self, *args: Any, **kwargs: Any) -> NoReturn:
        _refuse("save_model", "save_pretrained_stages")

    def save_state(self, *args: Any, **kwargs: Any) -> NoReturn:
        _refuse("save_state", "save_training_state")

    def load_state(self, *args: Any, **kwargs: Any) -> NoReturn:
        _refuse("load_state", "load_training_state")

    def split_between_processes(self, *args: Any, **kwargs: Any) -> NoReturn:
        _refuse("split_between_processes", "process_index and num_processes to slice")


def _refuse(method: str, instead: str) -> NoReturn:
    raise RuntimeError(f"{method} would treat one pipeline stage as the whole model or a replica; use {instead}.")


def _average(gradients: list[torch.Tensor], group: dist.ProcessGroup) -> None:
    flat = torch.cat([gradient.reshape(-1) for gradient in gradients])
    dist.all_reduce(flat, group=group)
    flat /= group.size()
    for gradient, part in zip(gradients, flat.split([gradient.numel() for gradient in gradients])):
        gradient.copy_(part.view_as(gradient))
