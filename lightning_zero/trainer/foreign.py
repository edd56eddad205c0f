"""Arguments of other strategies, and what to write in their place: for those who come from there.

Imports no torch: the command line looks a name up here, too. docs/migrating.md says more about each.
"""

from __future__ import annotations

import inspect
from collections.abc import Callable, Iterable
from difflib import get_close_matches
from functools import wraps
from typing import Any, ParamSpec

__all__ = ["answer", "answer_foreign_names", "attribute_of_ddp", "did_you_mean", "explain_attribute"]

_P = ParamSpec("_P")

# Names, and the sentence that answers them: of DDPStrategy, FSDPStrategy, ModelParallelStrategy and DeepSpeedStrategy,
# of DistributedDataParallel, FullyShardedDataParallel and fully_shard, also attributes of these, and keys of
# DeepSpeed's configuration.
_ANSWERS = {
    "cpu_offload offload_policy": "Write offload='cpu'.",
    "offload_optimizer offload_optimizer_device": "Write offload=HostOffload(), or NvmeOffload('/local') for files.",
    "offload_parameters offload_params_device offload_param": (
        "Write stage=3, offload=HostOffload(parameters=True), or NvmeOffload('/local', parameters=True) for files."
    ),
    "nvme_path": "Write offload=NvmeOffload('/local').",
    "params_buffer_count params_buffer_size optimizer_buffer_count": (
        "Write offload=NvmeOffload('/local', buffer_mib=256.0): one pool for all."
    ),
    "thread_count": "Write offload=NvmeOffload('/local', io_threads=4).",
    "pin_memory": "Write offload=HostOffload(pin_mib=0) to pin nothing; otherwise leave it out.",
    "max_in_cpu block_size queue_depth single_submit overlap_events sub_group_size": (
        "Leave it out: offloaded files have nothing to set for it."
    ),
    "auto_wrap_policy transformer_layer_cls_to_wrap": "Write units=['Block'] with your classes, or leave it out.",
    "activation_checkpointing_policy activation_checkpointing": "Write activations=['Block'] with your classes.",
    "cpu_checkpointing": "Write activations=ActivationPolicy('units', offload=True).",
    "partition_activations contiguous_memory_optimization synchronize_checkpoint_boundary": (
        "Leave it out: there is no tensor parallelism whose ranks could share activations."
    ),
    "state_dict_type": "Write checkpoint='consolidated' for 'full', or leave it out for 'sharded'.",
    "save_distributed_checkpoint": "Write checkpoint='consolidated' for False, or leave it out for True.",
    "stage3_gather_16bit_weights_on_model_save": "Write checkpoint='consolidated'.",
    "exclude_frozen_parameters": "Write checkpoint=CheckpointPolicy(exclude_frozen=True).",
    "load_full_weights": "Leave it out: files and directories are told apart.",
    "checkpoint_io": (
        "Leave it out: every rank writes its part. Or write checkpoint='consolidated', or "
        "CheckpointPolicy(async_save=True) to save in the background."
    ),
    "sharding_strategy": (
        "Write stage=3 for FULL_SHARD, stage=2 for SHARD_GRAD_OP, and shard_within='node' beside it for HYBRID_SHARD; "
        "for NO_SHARD use strategy='ddp'."
    ),
    "zero_optimization": "Write stage=1, 2 or 3; for False use strategy='ddp'.",
    "zero_stage": "Write stage=1, 2 or 3.",
    "reshard_after_forward": "Write stage=3 for True, stage=2 for False.",
    "device_mesh mesh data_parallel_size dp_mesh_dims process_group": (
        "Leave it out: all ranks take part. For groups that share what is sharded write shard_within=8, or 'node'."
    ),
    "zero_hpz_partition_size": "Write stage=3, secondary_shards=True.",
    "zero_quantized_weights zero_quantized_gradients": (
        "Write compression=Compression(weights='int8', gradients='int4'), for what goes between hosts."
    ),
    "tensor_parallel_size parallelize_fn": "Leave it out: there is no tensor parallelism. stage=3 saves the memory.",
    "reduce_bucket_size allgather_bucket_size": (
        "Write bucket_mib=100.0, in MiB and not in elements; in stage 3 units take its place."
    ),
    "bucket_cap_mb bucket_cap_mb_list": "Write bucket_mib=100.0 (stages 1 and 2).",
    "backward_prefetch forward_prefetch stage3_prefetch_bucket_size": "Write prefetch=2: units, for both ways.",
    "stage3_max_live_parameters stage3_max_reuse_distance stage3_param_persistence_threshold limit_all_gathers": (
        "Leave it out: the units, and how many are gathered ahead (prefetch=...), decide what is whole at a time."
    ),
    "forward_sync_buffers": "Write broadcast_buffers=False for False.",
    "mixed_precision mp_policy communication_data_type": (
        "Write Trainer(precision='bf16-mixed'), or the plugin ZeroPrecision('bf16-mixed', reduce_dtype='bfloat16')."
    ),
    "fp16 bf16": "Write Trainer(precision='16-mixed') or 'bf16-mixed'.",
    "loss_scale initial_scale_power loss_scale_window hysteresis min_loss_scale": (
        "Write ZeroPrecision('16-mixed', scaler=...): its scaler has these settings."
    ),
    "ddp_comm_hook ddp_comm_state ddp_comm_wrapper": (
        "Write compression=Compression(gradients='bfloat16') for fewer bytes between hosts, or leave it out."
    ),
    "find_unused_parameters skip_all_reduce_unused_params": "Leave it out: a step may use any part of the parameters.",
    "static_graph _set_static_graph": "Leave it out: the graph may change.",
    "gradient_as_bucket_view contiguous_gradients overlap_comm allgather_partitions reduce_scatter use_orig_params"
    " sync_module_states init_sync": "Leave it out: it is always so.",
    "model_averaging_period delay_all_reduce_named_params param_to_hook_all_reduce batched_grad_copy"
    " shard_placement_fn": "Leave it out: it has no counterpart.",
    "ignored_modules ignored_states ignored_params": "Leave it out: every parameter is sharded.",
    "param_init_fn remote_device": "Leave it out: build the model on the meta device in configure_model.",
    "device_id device_ids output_device dim check_reduction": "Leave it out: the Trainer (or Fabric) gives it.",
    "module": "Write `trainer.lightning_module`, which is the module under every strategy.",
    "join": "Write `ZeroStrategy(loaders=LoaderPolicy(training='join'))` where data end earlier on some ranks.",
    "reducer": (
        "Write `lightning_zero.full_gradient(module, name)` to see an averaged gradient, and bucket_mib=100.0 for the "
        "size of messages."
    ),
    "register_comm_hook": "Write `ZeroStrategy(compression=...)`.",
    "broadcast_buffers": "Write ZeroStrategy(broadcast_buffers=...).",
    "clip_grad_norm_": (
        "Write `self.clip_gradients(optimizer, gradient_clip_val=...)`, or in Fabric `fabric.clip_gradients(model, "
        "optimizer, max_norm=...)`."
    ),
    "no_sync require_backward_grad_sync": (
        "Write `with self.trainer.strategy.block_backward_sync():` around the backward."
    ),
    "summon_full_params": "Write `with lightning_zero.full_parameters(module):`.",
    "zero_allow_untested_optimizer": "Leave it out: optimizers are tried at set-up.",
    "logging_batch_size_per_gpu logging_level": "Leave it out: use logging.getLogger('lightning_zero').",
    "config": "Leave it out: write its settings as arguments, for example stage=3, offload='cpu'.",
    "devices num_nodes gradient_clip_val accumulate_grad_batches": "It is an argument of the Trainer (or of Fabric).",
    "gradient_clipping": "Write Trainer(gradient_clip_val=1.0).",
    "gradient_accumulation_steps": "Write Trainer(accumulate_grad_batches=4).",
    "train_batch_size train_micro_batch_size_per_gpu": "Leave it out: your DataLoader has it.",
    "optimizer scheduler": "Return it from configure_optimizers.",
    "precision": "Write Trainer(precision=...); a plugin is precision_plugin=ZeroPrecision(...).",
    "precision_plugin": "Write precision=ZeroPrecision(...) here, in Fabric.",
    "loaders": "Leave it out: in Fabric the loop is yours.",
}
_BY_NAME = {name: text for names, text in _ANSWERS.items() for name in names.split()}
_ATTRIBUTES = {
    *("module", "join", "reducer", "register_comm_hook", "broadcast_buffers", "find_unused_parameters"),
    *("static_graph", "_set_static_graph", "clip_grad_norm_", "summon_full_params"),
    *("no_sync", "require_backward_grad_sync"),
}


def answer(name: str, known: Iterable[str] = ()) -> str:
    """What to write in the place of an argument: another strategy's, or one that is nearly one of the ``known``."""
    return f" {_BY_NAME[name]}" if name in _BY_NAME else did_you_mean(name, known)


def attribute_of_ddp(name: str) -> str | None:
    """What to say of an attribute that a module has under DDP or FSDP only, which wrap it; ``None`` for any other."""
    if name not in _ATTRIBUTES:
        return None
    return f"DDP and FSDP wrap the module in one that has `{name}`; here nothing wraps it. {_BY_NAME[name]}"


def explain_attribute(error: BaseException, module: object) -> None:
    """Let an error about an attribute that ``module`` lacks say so."""
    name = error.name if isinstance(error, AttributeError) and error.obj is module else None
    if (advice := attribute_of_ddp(name or "")) is not None:
        error.args = (f"{error}. {advice}",)


def did_you_mean(name: str, known: Iterable[str]) -> str:
    """A question for the known name that is nearest to a wrong one, if one is near."""
    near = get_close_matches(name, list(known), n=1)
    return f" Did you mean {near[0]}?" if near else ""


def answer_foreign_names(more: Iterable[str] = ()) -> Callable[[Callable[_P, None]], Callable[_P, None]]:
    """For the constructor of a strategy: ``TypeError`` for arguments that it has not, with what to write instead.

    Its signature stays what type checkers and jsonargparse read. ``more`` are names that ``**kwargs`` stands for.
    """

    def decorate(init: Callable[_P, None]) -> Callable[_P, None]:
        parameters = inspect.signature(init).parameters.values()
        known = [p.name for p in parameters if p.kind in (p.POSITIONAL_OR_KEYWORD, p.KEYWORD_ONLY)][1:]
        known += more

        @wraps(init)
        def checked(*args: _P.args, **kwargs: _P.kwargs) -> None:
            foreign = [name for name in kwargs if name not in known]
            if foreign:
                owner: Any = type(args[0]).__name__
                raise TypeError(" ".join(f"{owner} has no argument {name!r}.{answer(name, known)}" for name in foreign))
            init(*args, **kwargs)

        return checked

    return decorate
