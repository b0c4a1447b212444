"""The table of import paths that older releases of Colossal-AI documented and later ones dropped.

Each row says what to write instead. Importing one raises an ImportError with that text.
"""

_BOOSTER = "the engine and its global context gave way to colossalai.booster.Booster"
_COORDINATOR = "ask colossalai.cluster.DistCoordinator for ranks, and a plugin for its groups"
_LAYERS = "sharded layers are in colossalai.shardformer.layer (Linear1D_Col, Linear1D_Row, VocabParallelEmbedding1D)"
_GEMINI = "use colossalai.booster.plugin.GeminiPlugin, or colossalai.zero.GeminiDDP"
_LAZY = "use colossalai.lazy.LazyInitContext"
_AMP = "use colossalai.booster.Booster(mixed_precision='fp16' or 'bf16'), or the plugin's precision argument"
_OUT = "it was tied to an old torch.fx and is not part of this library"

MOVED_MODULES: dict[str, str] = {
    "colossalai.legacy": f"{_BOOSTER}; see colossalai.booster.plugin for what spreads a model",
    "colossalai.legacy.amp": _AMP,
    "colossalai.legacy.core": f"{_BOOSTER}; {_COORDINATOR}",
    "colossalai.legacy.nn": _LAYERS,
    "colossalai.legacy.tensor": "use colossalai.tensor.d_tensor",
    "colossalai.legacy.zero": _GEMINI,
    "colossalai.core": f"{_BOOSTER}; {_COORDINATOR}",
    "colossalai.engine": _BOOSTER,
    "colossalai.trainer": f"{_BOOSTER}: write the loop with booster.backward(loss, optimizer) and optimizer.step()",
    "colossalai.builder": "build models, optimizers and datasets in plain torch and hand them to colossalai.booster.Booster.boost",
    "colossalai.registry": "registries went with the builder; hand objects to colossalai.booster.Booster.boost",
    "colossalai.communication": "use torch.distributed, or colossalai.shardformer.layer._operation",
    "colossalai.constants": f"{_COORDINATOR}",
    "colossalai.global_variables": f"{_COORDINATOR}",
    "colossalai.gemini": _GEMINI,
    "colossalai.context.parallel_mode": _COORDINATOR,
    "colossalai.context.parallel_context": _COORDINATOR,
    "colossalai.context.random": "seed with colossalai.utils.set_seed",
    "colossalai.context.moe_context": "use colossalai.booster.plugin.MoeHybridParallelPlugin",
    "colossalai.amp.amp_type": _AMP,
    "colossalai.amp.apex_amp": _AMP,
    "colossalai.amp.torch_amp": _AMP,
    "colossalai.nn.parallel": f"{_GEMINI}; for tensor parallelism use colossalai.shardformer",
    "colossalai.nn._ops": _LAYERS,
    "colossalai.nn.metric": "compute metrics in plain torch",
    "colossalai.nn.model": "build models in plain torch",
    "colossalai.nn.layer.moe": "use colossalai.booster.plugin.MoeHybridParallelPlugin",
    "colossalai.nn.layer.parallel_1d": _LAYERS,
    "colossalai.nn.layer.parallel_2d": _LAYERS,
    "colossalai.nn.layer.parallel_2p5d": _LAYERS,
    "colossalai.nn.layer.parallel_3d": _LAYERS,
    "colossalai.nn.layer.parallel_sequence": "use HybridParallelPlugin(enable_sequence_parallelism=True) of "
    "colossalai.booster.plugin",
    "colossalai.nn.layer.colossalai_layer": _LAYERS,
    "colossalai.nn.optimizer.zero_optimizer": "use colossalai.booster.plugin.LowLevelZeroPlugin or GeminiPlugin",
    "colossalai.nn.optimizer.gemini_optimizer": "use colossalai.zero.GeminiAdamOptimizer",
    "colossalai.kernel.cuda_native": "the layers are in colossalai.nn.layer (layernorm.MixedFusedLayerNorm, "
    "scaled_softmax), attention in colossalai.shardformer.layer.ColoAttention, kernels behind "
    "colossalai.kernel.kernel_loader",
    "colossalai.kernel.op_builder": "the builders are in colossalai.kernel.extensions",
    "colossalai.pipeline.pipelinable": "use HybridParallelPlugin(pp_size=...) of colossalai.booster.plugin",
    "colossalai.pipeline.rpc": "use colossalai.pipeline.schedule through HybridParallelPlugin(pp_size=...)",
    "colossalai.pipeline.schedule.generate": "use colossalai.pipeline.schedule",
    "colossalai.tensor.process_group": "use colossalai.cluster.ProcessGroupMesh",
    "colossalai.tensor.shape_consistency": "use colossalai.tensor.d_tensor.layout_converter",
    "colossalai.tensor.compute_spec": "use colossalai.tensor.d_tensor.sharding_spec",
    "colossalai.tensor.distspec": "use colossalai.tensor.d_tensor.sharding_spec",
    "colossalai.tensor.tensor_spec": "use colossalai.tensor.d_tensor.sharding_spec",
    "colossalai.utils.activation_checkpoint": "use torch.utils.checkpoint, or model.gradient_checkpointing_enable()",
    "colossalai.utils.checkpoint": "use booster.save_model and booster.load_model of colossalai.booster.Booster",
    "colossalai.utils.checkpointing": "use booster.save_model and booster.load_model of colossalai.booster.Booster",
    "colossalai.utils.checkpoint_io": "use booster.save_model and booster.load_model of colossalai.booster.Booster",
    "colossalai.utils.cuda": "use colossalai.utils.get_current_device, or colossalai.accelerator.get_accelerator",
    "colossalai.utils.data_sampler": "use plugin.prepare_dataloader of colossalai.booster.plugin",
    "colossalai.utils.model": _LAZY,
    "colossalai.utils.moe": "use colossalai.booster.plugin.MoeHybridParallelPlugin",
    "colossalai.utils.profiler": "use torch.profiler",
    "colossalai.zero.init_ctx": _LAZY,
    "colossalai.zero.legacy": _GEMINI,
    "colossalai.zero.shard_utils": _GEMINI,
    "colossalai.zero.sharded_model": _GEMINI,
    "colossalai.zero.sharded_optim": "use colossalai.booster.plugin.LowLevelZeroPlugin, or colossalai.zero.LowLevelZeroOptimizer",
    "colossalai.zero.sharded_param": _GEMINI,
    "colossalai.auto_parallel": f"{_OUT}; colossalai.booster.plugin.HybridParallelPlugin takes the sizes from you",
    "colossalai.autochunk": f"{_OUT}; use activation checkpointing of torch.utils.checkpoint",
    "colossalai.fx": f"{_OUT}; use torch.fx",
    "colossalai._analyzer": f"{_OUT}; use torch.fx",
    "colossalai.device.alpha_beta_profiler": "measuring links was part of auto-parallel; colossalai.device.device_mesh "
    "has DeviceMesh",
    "colossalai.device.calc_pipeline_strategy": "it was part of auto-parallel; colossalai.device.device_mesh has DeviceMesh",
}
"""Removed module, or package with all that was in it -> what to use."""

MOVED_NAMES: dict[str, dict[str, str]] = {
    "colossalai": {
        "load_config": "use colossalai.context.Config.from_file",
        "get_default_parser": "write the arguments with argparse; colossalai.launch_from_torch takes none of them",
    },
    "colossalai.amp": {
        "AMP_TYPE": _AMP,
        "convert_to_amp": _AMP,
        "convert_to_torch_amp": _AMP,
        "convert_to_apex_amp": _AMP,
    },
    "colossalai.cluster": {"ParallelMode": _COORDINATOR},
    "colossalai.context": {
        "ParallelMode": _COORDINATOR,
        "ParallelContext": _COORDINATOR,
        "seed": "seed with colossalai.utils.set_seed",
        "moe_context": "use colossalai.booster.plugin.MoeHybridParallelPlugin",
        "MOE_CONTEXT": "use colossalai.booster.plugin.MoeHybridParallelPlugin",
    },
    "colossalai.device": {"AlphaBetaProfiler": "measuring links was part of auto-parallel, which is not in this library"},
    "colossalai.initialize": {
        "initialize": f"{_BOOSTER}: call booster.boost(model, optimizer, criterion, dataloader, lr_scheduler)",
        "get_default_parser": "write the arguments with argparse; colossalai.launch_from_torch takes none of them",
    },
    "colossalai.kernel": {
        name: "use colossalai.nn.layer, colossalai.shardformer.layer or colossalai.kernel.kernel_loader"
        for name in ("LayerNorm", "FusedScaleMaskSoftmax", "MultiHeadAttention", "ColoAttention")
    },
    "colossalai.nn": {
        "Linear": _LAYERS,
        "CrossEntropyLoss": "use torch.nn.CrossEntropyLoss",
        "MoeLoss": "use colossalai.booster.plugin.MoeHybridParallelPlugin",
        "Accuracy": "compute metrics in plain torch",
        "ColossalaiOptimizer": "use colossalai.interface.OptimizerWrapper",
    },
    "colossalai.nn.layer": {
        "Linear": _LAYERS,
        "Embedding": _LAYERS,
        "VanillaPatchEmbedding": "build it in plain torch",
    },
    "colossalai.nn.optimizer": {
        "ZeroOptimizer": "use colossalai.booster.plugin.LowLevelZeroPlugin or GeminiPlugin",
        "ColossalaiOptimizer": "use colossalai.interface.OptimizerWrapper",
    },
    "colossalai.tensor": {
        "ProcessGroup": "use colossalai.cluster.ProcessGroupMesh",
        "ShardSpec": "use colossalai.tensor.d_tensor.ShardingSpec",
        "ReplicaSpec": "use colossalai.tensor.d_tensor.ShardingSpec",
        "ColoTensorSpec": "use colossalai.tensor.d_tensor.ShardingSpec",
        "ComputeSpec": "use colossalai.tensor.d_tensor.ShardingSpec",
        "ComputePattern": "use colossalai.tensor.d_tensor.ShardingSpec",
        "DistSpecManager": "use colossalai.tensor.d_tensor",
        "distspec": "use colossalai.tensor.d_tensor",
    },
    "colossalai.utils": {
        "free_port": "use colossalai.testing.free_port",
        "print_rank_0": "use colossalai.cluster.DistCoordinator().print_on_master",
        "is_using_pp": "ask the plugin: booster.plugin.pp_size > 1",
        "is_using_ddp": "ask the plugin: booster.plugin.dp_size > 1",
        "is_using_sequence": "ask the plugin: booster.plugin.sp_size > 1",
        "is_dp_rank_0": _COORDINATOR,
        "is_tp_rank_0": _COORDINATOR,
        "is_no_pp_or_last_stage": "ask the plugin: booster.plugin.stage_manager.is_last_stage()",
        "sync_model_param": "booster.boost makes the weights of all ranks equal",
        "clip_grad_norm_fp32": "use the plugin's max_norm argument, or optimizer.clip_grad_by_norm",
        "clip_grad_norm": "use the plugin's max_norm argument, or optimizer.clip_grad_by_norm",
        "count_zeros_fp32": "count them in plain torch",
        "get_dataloader": "use plugin.prepare_dataloader of colossalai.booster.plugin",
        "DataParallelSampler": "use plugin.prepare_dataloader of colossalai.booster.plugin",
        "save_checkpoint": "use booster.save_model of colossalai.booster.Booster",
        "load_checkpoint": "use booster.load_model of colossalai.booster.Booster",
        "checkpoint": "use torch.utils.checkpoint",
        "activation_checkpoint": "use torch.utils.checkpoint",
        "report_memory_usage": "use colossalai.accelerator.get_accelerator().memory_summary()",
        "copy_tensor_parallel_attributes": "tensors carry their layout; nothing has to be copied",
        "switch_virtual_pipeline_parallel_rank": "use HybridParallelPlugin(pp_style='interleaved')",
        "empty_cache": "use colossalai.accelerator.get_accelerator().empty_cache()",
        "synchronize": "use colossalai.accelerator.get_accelerator().synchronize()",
        "ColoInitContext": _LAZY,
    },
    "colossalai.zero": {
        "ColoInitContext": _LAZY,
        "ZeroInitContext": _LAZY,
        "post_process_colo_init_ctx": _LAZY,
        "ZeroDDP": _GEMINI,
        "ShardedModelV2": _GEMINI,
        "ShardedOptimizerV2": "use colossalai.booster.plugin.LowLevelZeroPlugin",
        "ShardedOptimizer": "use colossalai.booster.plugin.LowLevelZeroPlugin",
        "ZeroOptimizer": "use colossalai.booster.plugin.LowLevelZeroPlugin or GeminiPlugin",
        "convert_to_zero_v2": "use colossalai.booster.plugin.LowLevelZeroPlugin",
        "no_shard_zero_context": _LAZY,
    },
}
"""Module that exists -> name it no longer has -> what to use."""
