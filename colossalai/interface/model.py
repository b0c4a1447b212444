"""What a plugin hands back instead of the user's module."""

from collections import OrderedDict
from collections.abc import Iterator

import torch
from torch import nn


class ModelWrapper(nn.Module):
    """A module around the user's module; attributes of the inner one are reached through :meth:`unwrap`."""

    def __init__(self, module: nn.Module) -> None:
        super().__init__()
        self.module = module

    def unwrap(self, unwrap_peft: bool = True):
        """The user's module under all wrappers; a peft model as a view with the base model's names."""
        model = self.module.unwrap(unwrap_peft) if isinstance(self.module, ModelWrapper) else self.module
        if unwrap_peft and is_peft_model(model):
            model = PeftUnwrapMixin(model)
        return model

    def forward(self, *args, **kwargs):
        return self.module(*args, **kwargs)


class AMPModelMixin:
    """For wrappers whose optimizer keeps masters: called after the working weights were loaded anew."""

    def update_master_params(self) -> None:
        """Refresh the optimizer's masters from the working weights."""


def is_peft_model(model) -> bool:
    """Whether ``model`` was wrapped by peft, without importing peft."""
    return hasattr(model, "peft_config") and hasattr(model, "get_base_model")


class PeftUnwrapMixin:
    """The base model inside a peft model, under the base model's own names and without the adapters' parameters.

    Peft renames ``q_proj.weight`` to ``q_proj.base_layer.weight`` and puts ``lora_A``/``lora_B`` beside it. Checkpoints of the
    base model carry the base names, so reading and writing go through this view; everything else is the base model's.
    """

    def __init__(self, peft_model) -> None:
        self.peft_model = peft_model
        self.base_model = peft_model.get_base_model()

    @staticmethod
    def base_name(name: str):
        """Name in the base model of a parameter of the peft model's base, or None for an adapter's own."""
        if ".lora_" in name or ".modules_to_save." in name:
            return None
        return name.replace(".base_layer.", ".").replace(".original_module.", ".")

    def _renamed(self, items) -> Iterator:
        for name, value in items:
            base = self.base_name(name)
            if base is not None:
                yield base, value

    def named_parameters(self, *args, **kwargs):
        return self._renamed(self.base_model.named_parameters(*args, **kwargs))

    def named_buffers(self, *args, **kwargs):
        return self._renamed(self.base_model.named_buffers(*args, **kwargs))

    def state_dict(self, *args, **kwargs) -> dict[str, torch.Tensor]:
        return OrderedDict(self._renamed(self.base_model.state_dict(*args, **kwargs).items()))

    def patch_state_dict(self, state_dict: dict[str, torch.Tensor]) -> dict[str, torch.Tensor]:
        """``state_dict`` with base names turned into the names inside the peft model."""
        inner = {self.base_name(name): name for name in self.base_model.state_dict() if self.base_name(name)}
        return OrderedDict((inner.get(name, name), value) for name, value in state_dict.items())

    def load_state_dict(self, state_dict, strict: bool = True, assign: bool = False):
        own = self.base_model.state_dict()
        adapters = {name: value for name, value in own.items() if self.base_name(name) is None}
        return self.base_model.load_state_dict({**adapters, **self.patch_state_dict(state_dict)}, strict, assign)

    def __getattr__(self, name: str):
        return getattr(self.__dict__["base_model"], name)

    def __call__(self, *args, **kwargs):
        return self.base_model(*args, **kwargs)
