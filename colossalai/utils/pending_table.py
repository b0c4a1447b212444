"""The table of public names that are not built yet. Delete a row when its capability lands; it shrinks to nothing."""

PENDING: dict[str, dict[str, str]] = {}
"""Module -> name -> why it is missing and what to use today."""

ARGUMENTS: dict[str, str] = {
    "fp8_communication": "collectives in 8-bit floats come with the fp8 work; leave it False",
    "use_fp8": "8-bit matrix products come with the fp8 work; leave it False and use precision='bf16'",
    "quantize": "quantised base weights come with the bitsandbytes work; leave it False",
    "bnb_quantization_config": "quantised base weights come with the bitsandbytes work; leave it None",
    "nvme_offload_fraction": "optimizer states on disk come with Gemini; leave it 0.0, which keeps them in memory",
}
"""Arguments of names that are built whose meaning is not."""


def _capability(reason: str, modules: dict[str, str]) -> None:
    """Add names, given as one string a module, that wait for the same thing."""
    for module, names in modules.items():
        rows = PENDING.setdefault(f"colossalai.{module}", {})
        rows.update(dict.fromkeys(names.split(), reason))


_ZERO = "LowLevelZeroPlugin(stage=2) shards gradients and optimizer states today"

_capability(
    f"Gemini (parameters sharded and placed in chunks) is a later release; {_ZERO}, TorchFSDPPlugin parameters too.",
    {
        "booster.plugin": "GeminiPlugin",
        "booster.plugin.gemini_plugin": "GeminiPlugin GeminiCheckpointIO",
        "zero": "GeminiDDP GeminiOptimizer GeminiAdamOptimizer get_static_torch_model zero_model_wrapper zero_optim_wrapper",
        "zero.gemini": "GeminiDDP GeminiOptimizer GeminiAdamOptimizer GeminiManager ChunkManager TensorInfo "
        "TensorState search_chunk_configuration get_static_torch_model",
        "zero.gemini.chunk": "Chunk ChunkManager TensorInfo TensorState init_chunk_manager search_chunk_configuration "
        "classify_params_by_dp_degree",
        "zero.gemini.gemini_ddp": "GeminiDDP",
        "zero.gemini.gemini_optimizer": "GeminiOptimizer GeminiAdamOptimizer",
        "zero.gemini.gemini_mgr": "GeminiManager",
        "zero.gemini.memory_tracer": "MemStats MemStatsCollector ChunkMemStatsCollector AsyncMemoryMonitor "
        "SyncCudaMemoryMonitor OrderedParamGenerator",
        "zero.gemini.memory_tracer.runtime_mem_tracer": "RuntimeMemTracer",
        "zero.wrapper": "zero_model_wrapper zero_optim_wrapper",
    },
)

_HYBRID = "LowLevelZeroPlugin, TorchFSDPPlugin and TorchDDPPlugin spread a model by data today"

_capability(
    f"tensor, pipeline and sequence parallelism are a later release; {_HYBRID}.",
    {
        "booster.plugin": "HybridParallelPlugin",
        "booster.plugin.hybrid_parallel_plugin": "HybridParallelPlugin HybridParallelModule "
        "HybridParallelNaiveOptimizer HybridParallelAMPOptimizer HybridParallelZeroOptimizer get_param_info "
        "reinitialize_optimizer",
        "checkpoint_io": "HybridParallelCheckpointIO",
        "checkpoint_io.hybrid_parallel_checkpoint_io": "HybridParallelCheckpointIO",
    },
)

_capability(
    f"expert parallelism is a later release; {_HYBRID}, and train a mixture of experts whole.",
    {
        "booster.plugin": "MoeHybridParallelPlugin",
        "booster.plugin.moe_hybrid_parallel_plugin": "MoeHybridParallelPlugin MoeHybridParallelZeroOptimizer",
        "checkpoint_io": "MoECheckpointIO",
        "checkpoint_io.moe_checkpoint": "MoECheckpointIO",
        "moe": "",
        "moe._operation": "AllGather ReduceScatter AllToAll HierarchicalAllToAll MoeDispatch MoeCombine AllToAllUneven "
        "EPGradScalerIn EPGradScalerOut DPGradScalerIn DPGradScalerOut moe_cumsum all_to_all_uneven",
        "tensor.moe_tensor": "",
        "tensor.moe_tensor.api": "is_moe_tensor set_moe_tensor_ep_group get_ep_group get_ep_size get_ep_rank "
        "get_dp_group get_dp_size get_dp_rank get_ep_group_ranks get_dp_group_ranks get_moe_info",
        "tensor.moe_tensor.moe_info": "MoeParallelInfo",
        "shardformer.modeling.mixtral": "EPMixtralSparseMoeBlock",
        "shardformer.modeling.deepseek": "EPDeepseekMoE",
        "shardformer.modeling.deepseek_v3": "EpDeepseekV3MoE",
    },
)

_capability(
    "pipeline parallelism is a later release; accumulate gradients over micro-batches with Booster.no_sync today.",
    {
        "pipeline": "PipelineSchedule OneForwardOneBackwardSchedule InterleavedSchedule ZeroBubbleVPipeScheduler "
        "PipelineP2PCommunication PipelineStageManager",
        "pipeline.p2p": "PipelineP2PCommunication create_send_metadata",
        "pipeline.stage_manager": "PipelineStageManager",
        "pipeline.weight_grad_store": "WeightGradStore",
        "pipeline.schedule": "PipelineSchedule OneForwardOneBackwardSchedule InterleavedSchedule ZeroBubbleVPipeScheduler",
        "pipeline.schedule.base": "PipelineSchedule",
        "pipeline.schedule.one_f_one_b": "OneForwardOneBackwardSchedule",
        "pipeline.schedule.interleaved_pp": "InterleavedSchedule",
        "pipeline.schedule.zero_bubble_pp": "ZeroBubbleVPipeScheduler",
        "pipeline.schedule.v_schedule": "PipelineGraph ScheduledNode",
        "pipeline.schedule._utils": "get_batch_size get_micro_batch merge_batch",
    },
)

_SHARDED_LAYERS = (
    "Embedding1D VocabParallelEmbedding1D PaddingEmbedding Linear1D_Col Linear1D_Row LinearWithGradAccum PaddingLMHead "
    "VocabParallelLMHead1D GPT2FusedLinearConv1D_Col GPT2FusedLinearConv1D_Row GPT2FusedLinearConv FusedLinear1D_Col "
    "FusedLinear1D_Row FusedLinear DropoutForParallelInput DropoutForReplicatedInput LayerNorm RMSNorm FusedLayerNorm "
    "FusedRMSNorm BaseLayerNorm ParallelModule cross_entropy_1d dist_log_prob_1d dist_cross_entropy dist_log_prob "
    "all_to_all_comm ColoAttention AttnMaskType RingAttention get_pad_info"
)

_capability(
    f"Shardformer (tensor and sequence parallelism) is a later release; {_HYBRID}.",
    {
        "shardformer": "ShardConfig ShardFormer ModelSharder GradientCheckpointConfig PipelineGradientCheckpointConfig",
        "shardformer._utils": "getattr_",
        "shardformer.shard": "ShardConfig ShardFormer ModelSharder GradientCheckpointConfig PipelineGradientCheckpointConfig",
        "shardformer.shard.shard_config": "ShardConfig",
        "shardformer.shard.sharder": "ModelSharder",
        "shardformer.shard.shardformer": "ShardFormer",
        "shardformer.shard.grad_ckpt_config": "GradientCheckpointConfig PipelineGradientCheckpointConfig",
        "shardformer.shard.utils": "set_tensors_to_none",
        "shardformer.modeling": "",
        "shardformer.layer": _SHARDED_LAYERS,
        "shardformer.layer.attn": "ColoAttention AttnMaskType RingAttention get_pad_info invert_mask",
        "shardformer.layer.dropout": "DropoutForParallelInput DropoutForReplicatedInput",
        "shardformer.layer.embedding": "Embedding1D VocabParallelEmbedding1D PaddingEmbedding",
        "shardformer.layer.linear": "Linear1D_Col Linear1D_Row LinearWithGradAccum PaddingLMHead VocabParallelLMHead1D",
        "shardformer.layer.loss": "cross_entropy_1d dist_log_prob_1d dist_cross_entropy dist_log_prob",
        "shardformer.layer.normalization": "LayerNorm RMSNorm FusedLayerNorm FusedRMSNorm BaseLayerNorm",
        "shardformer.layer.parallel_module": "ParallelModule",
        "shardformer.layer.qkv_fused_linear": "GPT2FusedLinearConv1D_Col GPT2FusedLinearConv1D_Row GPT2FusedLinearConv "
        "FusedLinear1D_Col FusedLinear1D_Row FusedLinear split_fused_qkv_in_gpt2_style",
        "shardformer.layer.utils": "SeqParallelUtils Randomizer create_randomizer_with_offset split_batch_zigzag "
        "split_varlen_zigzag is_share_sp_tp RingComm",
        "shardformer.layer._operation": "gather_forward_split_backward split_forward_gather_backward reduce_forward "
        "reduce_backward gather_forward_reducescatter_backward reducescatter_forward_gather_backward gather_sp_output "
        "all_to_all_comm _gather",
        "shardformer.policies": "",
        "shardformer.policies.auto_policy": "get_autopolicy import_policy PolicyLocation",
        "shardformer.policies.base_policy": "Policy ModulePolicyDescription SubModuleReplacementDescription",
    },
)

_HEADS = "Model ForCausalLM ForSequenceClassification"
_POLICIES = {
    "bert": "Bert: BertPolicy Model ForPreTraining LMHeadModel ForMaskedLM ForSequenceClassification "
    "ForTokenClassification ForNextSentencePrediction ForMultipleChoice ForQuestionAnswering",
    "llama": f"Llama: LlamaPolicy {_HEADS}",
    "t5": "T5: T5BasePolicy T5EncoderPolicy Model ForConditionalGeneration ForTokenClassification",
    "gpt2": "GPT2: GPT2Policy Model LMHeadModel DoubleHeadsModel ForQuestionAnswering ForTokenClassification "
    "ForSequenceClassification",
    "gptj": "GPTJ: GPTJPolicy Model ForCausalLM ForQuestionAnswering ForSequenceClassification",
    "vit": "ViT: ViTPolicy Model ForImageClassification ForMaskedImageModeling",
    "opt": "OPT: OPTPolicy Model ForCausalLM ForSequenceClassification ForQuestionAnswering",
    "bloom": f"Bloom: BloomPolicy {_HEADS} ForTokenClassification ForQuestionAnswering",
    "whisper": "Whisper: WhisperPolicy Model ForConditionalGeneration ForAudioClassification",
    "sam": "Sam: SamPolicy Model",
    "blip2": "Blip2: BlipPolicy Model ForConditionalGeneration",
    "chatglm2": "ChatGLM: ChatGLMPolicy Model ForConditionalGeneration",
    "deepseek": "Deepseek: DeepseekPolicy Model ForCausalLM",
    "deepseek_v3": "DeepseekV3: DeepseekV3Policy Model ForCausalLM",
    "falcon": f"Falcon: FalconPolicy {_HEADS} ForTokenClassification ForQuestionAnswering",
    "mistral": f"Mistral: MistralPolicy {_HEADS}",
    "mixtral": f"Mixtral: MixtralPolicy {_HEADS}",
    "qwen2": f"Qwen2: Qwen2Policy {_HEADS}",
    "qwen3": f"Qwen3: Qwen3Policy {_HEADS}",
    "command": "Command: CommandPolicy Model ForCausalLM",
}
"""Policy module -> the prefix of its classes, then base policies by name and Hugging Face heads by suffix."""


def _policy_names(entry: str) -> str:
    prefix, _, names = entry.partition(": ")
    return " ".join(name if name.endswith("Policy") else f"{prefix}{name}Policy" for name in names.split())


_capability(
    f"Shardformer (tensor and sequence parallelism) is a later release; {_HYBRID}.",
    {f"shardformer.policies.{module}": _policy_names(entry) for module, entry in _POLICIES.items()},
)

_capability(
    "lazy initialisation is a later release; build the model as usual, or on torch.device('meta') for TorchFSDPPlugin.",
    {"lazy": "LazyInitContext LazyTensor", "lazy.lazy_init": "LazyInitContext LazyTensor _MyTensor"},
)

_capability(
    "8-bit floats are a later release; use precision='bf16' today.",
    {
        "quantization.fp8": "linear_fp8 cast_to_fp8 cast_from_fp8 all_reduce_fp8 reduce_scatter_fp8 all_gather_fp8 "
        "all_to_all_fp8 all_to_all_single_fp8 _all_reduce_fp8 _reduce_scatter_fp8 _all_gather_fp8 _all_to_all_fp8 "
        "_all_to_all_single_fp8 cast_to_fp8_pipeline cast_from_fp8_pipeline fp8_compress_ddp_grad_comm_hook_async "
        "fp8_compress_ddp_grad_comm_hook_sync fp8_compress_fsdp_grad_comm_hook fp8_compress_fsdp_params_comm_hook",
        "quantization.fp8_config": "dynamic_kernel",
        "quantization.fp8_hook": "FP8Hook",
        "quantization.utils": "patch_fsdp_params_comm_hook",
        "booster.mixed_precision": "FP8MixedPrecision",
        "booster.mixed_precision.fp8": "FP8MixedPrecision",
    },
)

_capability(
    "quantised training through bitsandbytes is a later release; load the model in bf16 today.",
    {
        "quantization": "BnbQuantizationConfig quantize_model",
        "quantization.bnb": "quantize_model",
        "quantization.bnb_config": "BnbQuantizationConfig",
    },
)

_capability(
    "this mixed precision was never finished in Colossal-AI; use Booster(mixed_precision='fp16') or 'bf16'.",
    {
        "booster.mixed_precision": "FP16ApexMixedPrecision FP16NaiveMixedPrecision",
        "booster.mixed_precision.fp16_apex": "FP16ApexMixedPrecision",
        "booster.mixed_precision.fp16_naive": "FP16NaiveMixedPrecision",
    },
)

_OPTIMIZERS = "HybridAdam, FusedAdam, Lamb and torch's own optimizers (torch.optim.Adafactor and Muon too) work today"
_GALORE = "GaLoreAdamW8bit GaLoreAdamW GaLoreAdafactor get_galore_param_groups"

_capability(
    f"this optimizer is a later release; {_OPTIMIZERS} under every plugin.",
    {
        "nn": "Adafactor CAME GaLoreAdamW8bit DistributedAdaFactor DistributedCAME DistributedLamb DistGaloreAwamW "
        "cast_to_distributed",
        "nn.optimizer": "Adafactor CAME GaLoreAdamW8bit DistributedAdaFactor DistributedCAME DistributedLamb "
        "DistGaloreAwamW cast_to_distributed",
        "nn.optimizer.adafactor": "Adafactor",
        "nn.optimizer.came": "CAME",
        "nn.optimizer.distributed_adafactor": "DistributedAdaFactor",
        "nn.optimizer.distributed_came": "DistributedCAME",
        "nn.optimizer.distributed_lamb": "DistributedLamb",
        "nn.optimizer.distributed_galore": "DistGaloreAwamW",
        "nn.optimizer.galore": _GALORE,
    },
)

_capability(
    "this kernel is a later release; the layers and optimizers of colossalai.nn fall back to torch by themselves.",
    {
        "kernel.kernel_loader": "LayerNormLoader MoeLoader FusedOptimizerLoader InferenceOpsLoader "
        "ScaledMaskedSoftmaxLoader ScaledUpperTriangleMaskedSoftmaxLoader FlashAttentionLoader FlashAttentionDaoLoader "
        "FlashAttentionWithCustomMaskLoader FlashAttentionForFloatAndCustomMaskLoader",
        "kernel.jit": "bias_dropout_add_fused_train bias_dropout_add_fused_inference bias_gelu_impl set_jit_fusion_options",
        "kernel.triton": "context_attention_unpadded flash_decoding_attention copy_k_to_blocked_cache "
        "copy_kv_to_blocked_cache softmax rms_layernorm rotary_embedding fused_rotary_embedding "
        "decoding_fused_rotary_embedding get_xine_cache",
        "kernel.triton.fused_rotary_embedding": "fused_rotary_embedding",
        "kernel.triton.no_pad_rotary_embedding": "rotary_embedding decoding_fused_rotary_embedding",
        "kernel.triton.rotary_cache_copy": "get_xine_cache",
    },
)

_D_TENSOR = (
    "is_distributed_tensor distribute_tensor init_as_dtensor to_global is_sharded shard_rowwise shard_colwise "
    "sharded_tensor_to_param compute_global_numel get_layout get_global_shape get_device_mesh get_sharding_spec "
    "redistribute get_shard_dim_1d is_customized_distributed_tensor distribute_tensor_with_customization "
    "init_tensor_as_customization_distributed to_global_for_customized_distributed_tensor "
    "customized_distributed_tensor_to_param"
)

_capability(
    "distributed tensors come with tensor parallelism, a later release; torch.distributed.tensor has them today.",
    {
        "tensor": "ColoTensor ColoParameter ColoParamOpHook ColoParamOpHookManager convert_parameter "
        "named_params_with_colotensor CommSpec CollectiveCommPattern convert_dim_partition_dict "
        "merge_same_dim_mesh_list",
        "tensor.colo_parameter": "ColoParameter",
        "tensor.colo_tensor": "ColoTensor",
        "tensor.param_op_hook": "ColoParamOpHook ColoParamOpHookManager",
        "tensor.sharding_spec": "ShardingSpec",
        "tensor.utils": "convert_parameter named_params_with_colotensor convert_dim_partition_dict "
        "merge_same_dim_mesh_list mix_gather_simulator",
        "tensor.d_tensor": f"{_D_TENSOR} Layout ShardingSpec",
        "tensor.d_tensor.api": f"{_D_TENSOR} sharded_tensor_to_existing_param "
        "customized_distributed_tensor_to_existing_param clear_layout_converter",
        "tensor.d_tensor.comm_spec": "CollectiveCommPattern",
        "tensor.d_tensor.layout": "Layout",
        "tensor.d_tensor.layout_converter": "LayoutConverter",
        "tensor.d_tensor.sharding_spec": "ShardingSpec DimSpec",
        "tensor.padded_tensor": "is_padded_tensor to_padded_tensor to_unpadded_tensor init_as_padded_tensor",
        "tensor.padded_tensor.api": "is_padded_tensor to_padded_tensor to_unpadded_tensor init_as_padded_tensor",
    },
)

_capability(
    "distributed tensors come with tensor parallelism, a later release.",
    {"tensor.d_tensor": "CommSpec", "tensor.d_tensor.comm_spec": "CommSpec"},
)

_capability(
    "inference is a later release; generate with the Hugging Face model that booster.save_model wrote.",
    {
        "inference": "InferenceConfig InferenceEngine",
        "inference.config": "InferenceConfig DiffusionGenerationConfig _DEFAULT_PROMPT_TEMPLATES",
        "inference.core": "InferenceEngine RequestHandler",
        "inference.core.engine": "InferenceEngine",
        "inference.core.llm_engine": "LLMEngine",
        "inference.core.async_engine": "AsyncInferenceEngine Tracer",
        "inference.core.request_handler": "RequestHandler RunningList",
        "inference.core.rpc_engine": "RPCInferenceEngine",
        "inference.batch_bucket": "BatchBucket",
        "inference.kv_cache": "KVCacheManager RPCKVCacheManager CacheBlock",
        "inference.struct": "Sequence RequestStatus",
        "inference.utils": "get_alibi_slopes",
        "inference.spec": "Drafter DrafterOutput GlideInput",
        "inference.spec.drafter": "Drafter",
        "inference.modeling.policy": "NoPaddingLlamaModelInferPolicy NoPaddingBaichuanModelInferPolicy "
        "GlideLlamaModelPolicy StableDiffusion3InferPolicy PixArtAlphaInferPolicy",
        "inference.modeling.policy.nopadding_llama": "NoPaddingLlamaModelInferPolicy",
        "inference.modeling.layers.attention": "PagedAttention copy_to_cache convert_kvcache",
        "inference.modeling.models.glide_llama": "GlideLlamaConfig GlideLlamaForCausalLM",
    },
)
