"""LoRA through `peft`: only small adapters train, so that a card with 8–24 GB holds a model of some billion weights.

The base weights exist once in memory: the stale sampler shares them with the policy and has adapters of its own. A
checkpoint holds adapters; at the end model/ holds the base with the adapters merged in, and adapter/ the adapters.
"""

import copy

import torch

from under_the_hood.errors import UserError, require


def add_adapters(model, *, rank: int, folder=None):
    """Put adapters of this rank beside every linear layer but the head, in place, and freeze the rest.

    folder: load the adapters of a checkpoint. The model is used as before; peft's wrapper, kept with it, saves them.
    """
    try:
        import peft
    except ImportError:
        raise UserError("--lora-rank needs the package peft: pip install peft") from None
    if folder:
        wrapper = peft.PeftModel.from_pretrained(model, folder, is_trainable=True)
    else:
        with torch.random.fork_rng(devices=[]):
            torch.manual_seed(0)  # alike in all processes, whatever was drawn before
            settings = peft.LoraConfig(r=rank, lora_alpha=2 * rank, target_modules="all-linear", lora_dropout=0.0,
                                       task_type="CAUSAL_LM")
            wrapper = peft.get_peft_model(model, settings)
    require(any(weight.requires_grad for weight in model.parameters()),
            f"--lora-rank: {type(model).__name__} has no linear layers")
    model.adapters = [wrapper]  # in a list, so that the model does not become a part of its own part
    wrapper.eval()


def has_adapters(model) -> bool:
    return hasattr(model, "adapters")


def copy_of_adapters(model):
    """A second model with adapters of its own that shares the frozen weights."""
    wrapper, shared = model.adapters, {id(weight): weight for weight in model.parameters() if not weight.requires_grad}
    model.adapters = []
    try:
        return copy.deepcopy(model, shared)
    finally:
        model.adapters = wrapper


def merged(model):
    """An ordinary model with the adapters merged into its weights; the original stays as it is."""
    plain = copy.deepcopy(model.adapters[0]).merge_and_unload()
    del plain.adapters
    return plain


def save(model, folder) -> None:
    """A checkpoint of the policy: the adapters where only they train, else the whole model."""
    if has_adapters(model):
        model.adapters[0].save_pretrained(folder, save_embedding_layers=False)
    else:
        model.save_pretrained(folder)


def own_state(model) -> dict:
    """The state dict without the frozen weights."""
    if not has_adapters(model):
        return model.state_dict()
    weights = model.named_parameters(remove_duplicate=False)  # a tied weight goes by two names
    frozen = {name for name, weight in weights if not weight.requires_grad}
    return {name: weight for name, weight in model.state_dict().items() if name not in frozen}
