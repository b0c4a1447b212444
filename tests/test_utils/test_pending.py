"""Names not built yet, and names that are gone."""

import importlib
import importlib.util
import sys
from abc import ABC, abstractmethod
from pathlib import Path

import pytest
from torch import nn

import colossalai
from colossalai.utils.errors import ConfigError, NotBuiltError
from colossalai.utils.moved_table import MOVED_MODULES, MOVED_NAMES
from colossalai.utils.pending import PendingFinder, pending_rows, refuse_pending_arguments
from colossalai.utils.pending_table import ARGUMENTS, PENDING

pytestmark = pytest.mark.fast

PACKAGE = Path(colossalai.__file__).parent
ROWS = list(pending_rows())


def on_disk(module: str) -> bool:
    path = PACKAGE.joinpath(*module.split(".")[1:])
    return path.with_suffix(".py").is_file() or (path / "__init__.py").is_file()


def test_every_row_imports_and_raises_when_used():
    for module, name, reason in ROWS:
        thing = getattr(importlib.import_module(module), name)
        with pytest.raises(NotBuiltError) as raised:
            thing()
        assert name in str(raised.value) and reason in str(raised.value)
        assert len(reason) > 20


def test_modules_without_names_of_their_own_import_too():
    for module in PENDING:
        importlib.import_module(module)


def test_no_row_shadows_something_that_exists():
    """Delete the row when the name is built. A package that has rows must serve them."""
    for module, names in PENDING.items():
        if on_disk(module):
            real = vars(importlib.import_module(module))
            assert not set(names) & set(real), f"{module}: {set(names) & set(real)} are built; delete their rows"
            assert "__getattr__" in real or not names, f"{module} needs __getattr__ = pending_names(__name__)"
    for module in MOVED_MODULES:
        assert module == "colossalai.legacy" or not on_disk(module), module  # which holds aliases, and hints for the rest
        assert module not in PENDING, module
    for module, names in MOVED_NAMES.items():
        assert not set(names) & set(vars(importlib.import_module(module))), module
        assert not set(names) & set(PENDING.get(module, ())), module


def test_all_paths_of_a_name_lead_to_one_object():
    from colossalai.lazy import LazyInitContext
    from colossalai.lazy.lazy_init import LazyInitContext as Deep
    from colossalai.tensor.d_tensor import CommSpec as Other

    from colossalai.tensor import CommSpec

    assert Deep is LazyInitContext and CommSpec is not Other


def test_pending_classes_are_classes():
    from colossalai.lazy import LazyInitContext

    from colossalai.booster.plugin import GeminiPlugin, HybridParallelPlugin

    assert isinstance(object(), HybridParallelPlugin) is False
    assert isinstance(3, (GeminiPlugin, HybridParallelPlugin)) is False
    assert issubclass(HybridParallelPlugin, object) and not issubclass(int, HybridParallelPlugin)

    def annotated(plugin: HybridParallelPlugin | None) -> "list[GeminiPlugin]": ...

    class Mine(HybridParallelPlugin):
        def __init__(self):
            super().__init__(1, 1)

    with pytest.raises(NotImplementedError, match="HybridParallelPlugin is not built yet"):
        Mine()
    assert not isinstance(3, Mine) and Mine.__name__ == "Mine"
    assert not hasattr(LazyInitContext, "materialize") and LazyInitContext.__module__.startswith("colossalai.lazy")
    with pytest.raises(NotBuiltError, match="LazyInitContext.materialize"):
        LazyInitContext.materialize(None)


def test_pending_classes_go_together_with_others():
    from colossalai.shardformer.layer import ParallelModule
    from colossalai.shardformer.policies.base_policy import Policy

    class Layer(ParallelModule, nn.Module):
        pass

    class Abstract(ABC):
        @abstractmethod
        def run(self): ...

    class Both(Policy, Abstract):
        pass

    for kind in (Layer, Both):
        with pytest.raises(NotBuiltError):
            kind()


def test_pending_functions_are_functions():
    from colossalai.shardformer.policies.auto_policy import get_autopolicy

    assert get_autopolicy.__name__ == "get_autopolicy" and not isinstance(get_autopolicy, type)
    with pytest.raises(NotBuiltError, match="get_autopolicy"):
        get_autopolicy(nn.Linear(1, 1))


def test_star_import_of_a_pending_module():
    names: dict = {}
    exec("from colossalai.pipeline.schedule import *", names)
    assert "OneForwardOneBackwardSchedule" in names


def test_names_that_never_were_stay_errors():
    with pytest.raises(ImportError, match="cannot import name 'LazyNothing'"):
        from colossalai.lazy import LazyNothing  # noqa: F401
    with pytest.raises(ModuleNotFoundError):
        importlib.import_module("colossalai.nothing")
    assert importlib.util.find_spec("colossalai.nothing") is None
    assert not hasattr(colossalai, "nothing")


def test_finder_stands_last_and_once():
    colossalai.install()
    finders = [finder for finder in sys.meta_path if isinstance(finder, PendingFinder)]
    assert len(finders) == 1
    assert PendingFinder().find_spec("os.path") is None and PendingFinder().find_spec("colossalaix.lazy") is None


def test_refuse_pending_arguments():
    refuse_pending_arguments("Plugin", fp8_communication=False, use_fp8=None)
    with pytest.raises(NotBuiltError, match=r"Plugin\(fp8_communication=True\)") as raised:
        refuse_pending_arguments("Plugin", use_fp8=False, fp8_communication=True)
    assert ARGUMENTS["fp8_communication"] in str(raised.value)
    with pytest.raises(ConfigError, match="not in the table"):
        refuse_pending_arguments("Plugin", colour=True)


# The public names of priority P0 and P1: module, then names; an indented line goes on with those of the line above.
PUBLIC = """
colossalai launch launch_from_torch launch_from_slurm launch_from_openmpi __version__ accelerator
colossalai.initialize launch launch_from_torch launch_from_slurm launch_from_openmpi
colossalai.accelerator get_accelerator set_accelerator auto_set_accelerator BaseAccelerator CudaAccelerator
    NpuAccelerator CpuAccelerator
colossalai.utils get_current_device set_seed ensure_path_exists conditional_context is_ddp_ignored disposable
    free_storage _cast_float Timer MultiTimer multi_tensor_applier TensorDetector colo_device_memory_capacity
    colo_set_process_memory_fraction get_non_persistent_buffers_set
colossalai.utils.memory colo_device_memory_capacity colo_get_cpu_memory_capacity
colossalai.utils.timer Timer MultiTimer
colossalai.utils.rank_recorder recorder
colossalai.logging get_dist_logger disable_existing_loggers DistributedLogger
colossalai.cluster DistCoordinator ProcessGroupMesh ProcessGroupManager
colossalai.cluster.dist_coordinator DistCoordinator
colossalai.cluster.device_mesh_manager DeviceMeshManager DeviceMeshInfo
colossalai.context Config ConfigException
colossalai.context.singleton_meta SingletonMeta
colossalai.context.config Config
colossalai.device.device_mesh DeviceMesh
colossalai.testing spawn rerun_if_address_is_in_use rerun_on_exception parameterize clear_cache_before_run
    skip_if_not_enough_gpus free_port assert_equal assert_not_equal assert_close assert_close_loose
    assert_equal_in_group check_state_dict_equal assert_hf_output_close DummyDataloader run_on_environment_flag
colossalai.testing.random seed_all
colossalai.booster Booster Plugin Accelerator
colossalai.booster.booster Booster
colossalai.booster.accelerator Accelerator
colossalai.booster.plugin Plugin TorchDDPPlugin GeminiPlugin LowLevelZeroPlugin HybridParallelPlugin
    MoeHybridParallelPlugin TorchFSDPPlugin
colossalai.booster.plugin.dp_plugin_base DPPluginBase
colossalai.booster.plugin.plugin_base Plugin
colossalai.booster.plugin.pp_plugin_base PipelinePluginBase
colossalai.booster.plugin.hybrid_parallel_plugin HybridParallelPlugin HybridParallelModule
    HybridParallelNaiveOptimizer HybridParallelAMPOptimizer HybridParallelZeroOptimizer get_param_info
    reinitialize_optimizer
colossalai.booster.plugin.moe_hybrid_parallel_plugin MoeHybridParallelPlugin MoeHybridParallelZeroOptimizer
colossalai.booster.plugin.low_level_zero_plugin LowLevelZeroPlugin LowLevelZeroModel LowLevelZeroCheckpointIO
colossalai.booster.plugin.gemini_plugin GeminiPlugin GeminiCheckpointIO
colossalai.booster.plugin.torch_ddp_plugin TorchDDPPlugin TorchDDPModel TorchDDPCheckpointIO
colossalai.booster.plugin.torch_fsdp_plugin TorchFSDPPlugin TorchFSDPModel FSDPOptimizerWrapper TorchFSDPCheckpointIO
colossalai.booster.mixed_precision FP16TorchMixedPrecision FP16ApexMixedPrecision FP16NaiveMixedPrecision
    BF16MixedPrecision FP8MixedPrecision MixedPrecision mixed_precision_factory
colossalai.amp.naive_amp.mixed_precision_optimizer MixedPrecisionOptimizer
colossalai.amp.naive_amp.grad_scaler BaseGradScaler ConstantGradScaler DynamicGradScaler
colossalai.amp.naive_amp.mixed_precision_mixin MixedPrecisionMixin FP16MixedPrecisionMixin BF16MixedPrecisionMixin
colossalai.nn HybridAdam LinearWarmupLR CosineAnnealingWarmupLR
colossalai.nn.optimizer HybridAdam CPUAdam FusedAdam FusedLAMB FusedSGD Lamb Lars Adafactor CAME GaLoreAdamW8bit
    DistributedLamb DistributedCAME DistributedAdaFactor DistGaloreAwamW cast_to_distributed
colossalai.nn.lr_scheduler CosineAnnealingLR CosineAnnealingWarmupLR FlatAnnealingLR FlatAnnealingWarmupLR
    LinearWarmupLR MultiStepLR MultiStepWarmupLR OneCycleLR PolynomialLR PolynomialWarmupLR LambdaLR MultiplicativeLR
    StepLR ExponentialLR
colossalai.shardformer ShardConfig ShardFormer ModelSharder GradientCheckpointConfig PipelineGradientCheckpointConfig
colossalai.shardformer.policies.base_policy Policy ModulePolicyDescription SubModuleReplacementDescription
colossalai.shardformer.policies.auto_policy get_autopolicy import_policy PolicyLocation
colossalai.shardformer.policies.llama LlamaPolicy LlamaModelPolicy LlamaForCausalLMPolicy
    LlamaForSequenceClassificationPolicy
colossalai.shardformer.policies.gpt2 GPT2Policy GPT2LMHeadModelPolicy
colossalai.shardformer.policies.bert BertPolicy BertForSequenceClassificationPolicy
colossalai.shardformer.policies.opt OPTForCausalLMPolicy
colossalai.shardformer.policies.vit ViTPolicy ViTForImageClassificationPolicy
colossalai.shardformer.policies.t5 T5BasePolicy T5EncoderPolicy T5ForConditionalGenerationPolicy
colossalai.shardformer.policies.command CommandPolicy CommandForCausalLMPolicy
colossalai.shardformer.layer Linear1D_Col Linear1D_Row VocabParallelEmbedding1D VocabParallelLMHead1D ColoAttention
    AttnMaskType RingAttention get_pad_info cross_entropy_1d dist_cross_entropy
colossalai.shardformer.layer.loss dist_log_prob
colossalai.shardformer.layer.utils split_batch_zigzag Randomizer
colossalai.shardformer.shard.shard_config ShardConfig
colossalai.pipeline PipelineSchedule OneForwardOneBackwardSchedule InterleavedSchedule ZeroBubbleVPipeScheduler
    PipelineP2PCommunication PipelineStageManager
colossalai.pipeline.stage_manager PipelineStageManager
colossalai.pipeline.schedule.v_schedule PipelineGraph ScheduledNode
colossalai.pipeline.schedule.one_f_one_b OneForwardOneBackwardSchedule
colossalai.zero GeminiDDP GeminiOptimizer GeminiAdamOptimizer LowLevelZeroOptimizer zero_model_wrapper
    zero_optim_wrapper get_static_torch_model
colossalai.zero.low_level LowLevelZeroOptimizer
colossalai.zero.gemini.memory_tracer.runtime_mem_tracer RuntimeMemTracer
colossalai.lazy LazyInitContext LazyTensor
colossalai.lazy.lazy_init _MyTensor
colossalai.interface ModelWrapper OptimizerWrapper AMPModelMixin
colossalai.interface.optimizer DistributedOptim
colossalai.checkpoint_io CheckpointIO GeneralCheckpointIO HybridParallelCheckpointIO MoECheckpointIO
    CheckpointIndexFile
colossalai.cli cli
colossalai.quantization BnbQuantizationConfig quantize_model
colossalai.quantization.fp8 linear_fp8 all_reduce_fp8 cast_to_fp8 cast_from_fp8
colossalai.quantization.fp8_hook FP8Hook
colossalai.kernel.kernel_loader KernelLoader CPUAdamLoader FusedOptimizerLoader LayerNormLoader MoeLoader
    InferenceOpsLoader ScaledMaskedSoftmaxLoader ScaledUpperTriangleMaskedSoftmaxLoader FlashAttentionLoader
    FlashAttentionDaoLoader FlashAttentionWithCustomMaskLoader FlashAttentionForFloatAndCustomMaskLoader
colossalai.tensor ColoTensor ColoParameter
colossalai.tensor.d_tensor is_distributed_tensor shard_rowwise shard_colwise
colossalai.tensor.moe_tensor.api is_moe_tensor
colossalai.moe._operation MoeDispatch
colossalai.inference InferenceConfig InferenceEngine
"""


@pytest.mark.parametrize("line", PUBLIC.strip().replace("\n    ", " ").splitlines(), ids=lambda line: line.split()[0])
def test_public_names_import(line):
    module, *names = line.split()
    imported = importlib.import_module(module)
    missing = [name for name in names if not hasattr(imported, name)]
    assert not missing, f"{module} lacks {missing}: build them, or give them rows in colossalai/utils/pending_table.py"


# Import lines of the documents and questions of releases 0.1 to 0.5, and what the answer must name.
OLD = [
    ("from colossalai.zero import ColoInitContext", "colossalai.lazy.LazyInitContext"),
    ("from colossalai.utils.model.colo_init_context import ColoInitContext", "colossalai.lazy.LazyInitContext"),
    ("from colossalai.zero.init_ctx import ZeroInitContext", "colossalai.lazy.LazyInitContext"),
    ("from colossalai.zero import ZeroDDP, ZeroOptimizer", "colossalai.zero.GeminiDDP"),
    ("from colossalai.nn.parallel import ZeroDDP", "colossalai.zero.GeminiDDP"),
    ("from colossalai.nn.parallel.data_parallel import ColoDDP", "colossalai.zero.GeminiDDP"),
    ("from colossalai.nn.optimizer.gemini_optimizer import GeminiAdamOptimizer", "colossalai.zero.GeminiAdamOptimizer"),
    ("from colossalai.nn.optimizer.zero_optimizer import ZeroOptimizer", "LowLevelZeroPlugin"),
    ("from colossalai.gemini import ChunkManager, GeminiManager", "colossalai.zero.GeminiDDP"),
    ("from colossalai.gemini.chunk import init_chunk_manager", "colossalai.zero.GeminiDDP"),
    ("from colossalai.zero.sharded_model import ShardedModelV2", "colossalai.zero.GeminiDDP"),
    ("from colossalai.zero.sharded_optim import LowLevelZeroOptimizer", "colossalai.zero.LowLevelZeroOptimizer"),
    ("from colossalai.zero.shard_utils import TensorShardStrategy", "GeminiPlugin"),
    ("from colossalai.kernel.cuda_native import FusedScaleMaskSoftmax", "colossalai.nn.layer"),
    (
        "from colossalai.kernel.cuda_native import LayerNorm, MultiHeadAttention",
        "colossalai.shardformer.layer.ColoAttention",
    ),
    ("from colossalai.kernel.op_builder import CPUAdamBuilder", "colossalai.kernel.extensions"),
    ("from colossalai.kernel import LayerNorm", "colossalai.nn.layer"),
    ("from colossalai.amp import AMP_TYPE", "mixed_precision='fp16'"),
    ("from colossalai.amp.amp_type import AMP_TYPE", "mixed_precision='fp16'"),
    ("from colossalai.legacy.amp import AMP_TYPE", "mixed_precision='fp16'"),
    ("from colossalai.core import global_context as gpc", "colossalai.cluster.DistCoordinator"),
    ("from colossalai.legacy.core import global_context as gpc", "colossalai.cluster.DistCoordinator"),
    ("from colossalai.context import ParallelMode", "colossalai.cluster.DistCoordinator"),
    ("from colossalai.context.parallel_mode import ParallelMode", "colossalai.cluster.DistCoordinator"),
    ("from colossalai.engine import Engine", "colossalai.booster.Booster"),
    ("from colossalai.engine.schedule import PipelineSchedule", "colossalai.booster.Booster"),
    ("from colossalai.trainer import Trainer, hooks", "colossalai.booster.Booster"),
    ("from colossalai.legacy.trainer import Trainer, hooks", "colossalai.booster.Booster"),
    ("from colossalai.legacy.engine import Engine", "colossalai.booster.Booster"),
    ("from colossalai.legacy import engine", "colossalai.booster.Booster"),
    ("from colossalai.nn import parallel", "colossalai.zero.GeminiDDP"),
    ("from colossalai.builder import build_model", "colossalai.booster.Booster"),
    ("from colossalai.registry import MODELS", "colossalai.booster.Booster"),
    ("from colossalai import get_default_parser", "argparse"),
    ("from colossalai.initialize import initialize", "booster.boost"),
    ("from colossalai.initialize import get_default_parser", "argparse"),
    ("from colossalai.utils import free_port", "colossalai.testing.free_port"),
    ("from colossalai.utils import get_dataloader, MultiTimer", "prepare_dataloader"),
    ("from colossalai.utils import print_rank_0", "print_on_master"),
    ("from colossalai.utils import is_using_pp", "pp_size"),
    ("from colossalai.utils import save_checkpoint", "booster.save_model"),
    ("from colossalai.utils.checkpoint import save_checkpoint", "booster.save_model"),
    ("from colossalai.utils.cuda import get_current_device", "colossalai.utils.get_current_device"),
    ("from colossalai.utils.activation_checkpoint import checkpoint", "torch.utils.checkpoint"),
    ("from colossalai.tensor import ProcessGroup, ShardSpec", "colossalai.cluster.ProcessGroupMesh"),
    ("from colossalai.tensor import ComputePattern, ComputeSpec", "colossalai.tensor.d_tensor"),
    ("from colossalai.nn import CrossEntropyLoss", "torch.nn.CrossEntropyLoss"),
    ("from colossalai.nn.metric import Accuracy", "torch"),
    ("from colossalai.nn.layer import VanillaPatchEmbedding", "torch"),
    ("from colossalai.pipeline.pipelinable import PipelinableContext", "HybridParallelPlugin"),
    ("from colossalai.communication import all_gather", "torch.distributed"),
    ("from colossalai.auto_parallel.tensor_shard.initialize import initialize_model", "HybridParallelPlugin"),
    ("from colossalai.fx.profiler import parameter_size", "torch.fx"),
    ("from colossalai.device import AlphaBetaProfiler", "auto-parallel"),
]


@pytest.mark.parametrize(("line", "names"), OLD, ids=[line for line, _ in OLD])
def test_c88_old_import_lines_import_or_name_the_new_path(line, names):
    try:
        exec(line, {})
    except ImportError as error:
        assert names in str(error), error


STILL = """
from colossalai.nn.optimizer import HybridAdam, CPUAdam, FusedAdam
from colossalai.nn.optimizer.hybrid_adam import HybridAdam
from colossalai.nn.lr_scheduler import CosineAnnealingWarmupLR
from colossalai.booster.plugin import GeminiPlugin, LowLevelZeroPlugin, TorchDDPPlugin
from colossalai.zero.gemini import GeminiDDP
from colossalai.lazy import LazyInitContext
from colossalai.legacy.utils.memory import colo_set_process_memory_fraction
from colossalai.tensor.d_tensor import is_distributed_tensor
from colossalai.testing import parameterize, rerun_if_address_is_in_use, spawn
from colossalai.utils import get_current_device, MultiTimer
from colossalai.logging import disable_existing_loggers, get_dist_logger
from colossalai.interface.model import PeftUnwrapMixin
"""


@pytest.mark.parametrize("line", STILL.strip().splitlines())
def test_c88_documented_lines_still_import(line):
    exec(line, {})


def test_c88_every_moved_row_raises_with_its_hint():
    for module, hint in MOVED_MODULES.items():
        with pytest.raises(ModuleNotFoundError) as raised:
            importlib.import_module(f"{module}.part" if on_disk(module) else module)
        assert hint in str(raised.value), module
    for module, names in MOVED_NAMES.items():
        for name, hint in names.items():
            with pytest.raises(ImportError) as raised:
                exec(f"from {module} import {name}", {})
            assert hint in str(raised.value), (module, name)
