"""Several processes train one model: each samples its share of every batch, and their gradients are added.

PyTorch's launcher starts them, on one machine or on several:

    torchrun --nproc-per-node 2 06_full_llm_training.py …          two processes; nothing else changes
    torchrun --nproc-per-node 8 06_full_llm_training.py --shard …  weights, gradients, optimizer state are split, too

In a single process every function here returns what it was given or does nothing, so that 06 needs no branches.

Only one fact about reinforcement learning is in this file: a mean over a batch is not the mean of the processes'
means, since their responses differ in length. So 06 divides by the token count of all processes, and here is the sum.
"""

import contextlib
import datetime
import os
import types

import torch
import torch.distributed as dist
from torch.utils._pytree import tree_map


def start(device: torch.device) -> torch.device:
    """Join the other processes, if torchrun started this one. Returns the device of this process."""
    if "cuda" in device.type and device.index is None:
        device = torch.device("cuda", int(os.environ.get("LOCAL_RANK", "0")) % torch.cuda.device_count())
        torch.cuda.set_device(device)
    if int(os.environ.get("WORLD_SIZE", "1")) > 1 and not dist.is_initialized():
        dist.init_process_group("cpu:gloo,cuda:nccl" if device.type == "cuda" else "gloo",
                                timeout=datetime.timedelta(hours=2))  # the others wait while rank 0 loads a model
    return device


def stop() -> None:
    if dist.is_initialized():
        dist.destroy_process_group()


def size() -> int:
    return dist.get_world_size() if dist.is_initialized() else 1


def rank() -> int:
    return dist.get_rank() if dist.is_initialized() else 0


def own_seed(seed: int) -> int:
    """A sampling seed for this process: with a common one all processes would sample the same random numbers."""
    return seed + 1_000_003 * rank()


def print_rank0(text: str) -> None:
    if rank() == 0:
        print(text)


def barrier() -> None:
    """Wait until every process is here."""
    if size() > 1:
        dist.barrier()


@contextlib.contextmanager
def main_process_first():
    """Rank 0 runs the block first, and fills a cache that all machines must see; then the others run it."""
    if rank() > 0:
        barrier()
    yield
    if rank() == 0:
        barrier()


# %% Numbers


def all_reduce_sum(tensor):
    """The sum over the processes, on each of them."""
    if size() == 1:
        return tensor
    total = tensor.clone()
    dist.all_reduce(total)
    return total


def largest(number: int) -> int:
    if size() == 1:
        return number
    value = torch.tensor(number)
    dist.all_reduce(value, dist.ReduceOp.MAX)
    return int(value)


def gather(tensor):
    """The rows of all processes, rank after rank: (N_rank, …) → (Σ N_rank, …). The counts may differ."""
    if size() == 1:
        return tensor
    counts = [torch.zeros(1, dtype=torch.long, device=tensor.device) for _ in range(size())]
    dist.all_gather(counts, torch.tensor([len(tensor)], device=tensor.device))
    most = max(map(int, counts))
    padded = torch.cat([tensor, tensor.new_zeros(most - len(tensor), *tensor.shape[1:])])
    parts = [torch.empty_like(padded) for _ in counts]
    dist.all_gather(parts, padded)
    return torch.cat([part[: int(count)] for part, count in zip(parts, counts)])


def own_part(tensor):
    """This process's rows of what gather made."""
    return tensor.chunk(size())[rank()]


def gather_objects(item) -> list:
    """What each process holds, rank after rank."""
    if size() == 1:
        return [item]
    items = [None] * size()
    dist.all_gather_object(items, item)
    return items


def move(tree, device):
    """The same nested lists and dicts with their tensors on another device."""
    return tree_map(lambda leaf: leaf.to(device) if isinstance(leaf, torch.Tensor) else leaf, tree)


def in_step(parts: list, *, sharded: bool):
    """Yield (part, counts) for each pass of a step; counts is 1, or 0 for a pass that must not count.

    Sharded processes gather each other's weights in every pass, so all must run equally many: one with fewer parts
    repeats some of them, with counts 0.
    """
    for number in range(largest(len(parts)) if sharded else len(parts)):
        yield parts[number % len(parts)], float(number < len(parts))


# %% Replicas: every process holds the whole model


def add_gradients(parameters, *, bucket: int = 2**25) -> None:
    """Replace each gradient by its sum over the processes, in messages of about `bucket` elements."""
    waiting, count = [], 0
    gradients = [p.grad for p in parameters if p.grad is not None] if size() > 1 else []
    for i, gradient in enumerate(gradients):
        waiting.append(gradient)
        count += gradient.numel()
        if count >= bucket or i + 1 == len(gradients):
            flat = torch.cat([g.flatten() for g in waiting])
            dist.all_reduce(flat)
            for g, part in zip(waiting, flat.split([g.numel() for g in waiting])):
                g.copy_(part.view_as(g))
            waiting, count = [], 0


def scale(loss, model):
    """The loss to differentiate: gradients of sharded weights are averaged over the processes; a sum is wanted."""
    return loss * size() if is_sharded(model) else loss


def clip_gradients(model, most: float):
    """Sum the processes' gradients (sharded ones are summed already), clip their global L2 norm, and return it."""
    if not is_sharded(model):
        add_gradients(model.parameters())
    return whole(torch.nn.utils.clip_grad_norm_(model.parameters(), most))


# %% Shards: every process holds a part of each weight, and of all that comes with it (FSDP2)


def shard(model, token_logprobs, *, compute_dtype=None) -> None:
    """Split the weights over the processes, in place; model.token_logprobs(…) then runs the given function on them.

    A block's weights are gathered when it runs and dropped afterwards. FSDP averages gradients: multiply the loss by
    size().
    """
    from torch.distributed.device_mesh import init_device_mesh
    from torch.distributed.fsdp import MixedPrecisionPolicy, fully_shard, register_fsdp_forward_method

    mesh = init_device_mesh(next(model.parameters()).device.type, (size(),))
    policy = MixedPrecisionPolicy(param_dtype=compute_dtype, reduce_dtype=torch.float32)
    blocks = [module for module in model.modules() if type(module).__name__ in (model._no_split_modules or ())]
    for module in [*blocks, model]:
        fully_shard(module, mesh=mesh, mp_policy=policy)
    model.token_logprobs, model.is_sharded = types.MethodType(token_logprobs, model), True
    register_fsdp_forward_method(model, "token_logprobs")


def is_sharded(model) -> bool:
    return getattr(model, "is_sharded", False)


def is_part(tensor) -> bool:
    """Is this a DTensor, split over the processes? Asked without importing that class, which takes half a second."""
    return hasattr(tensor, "full_tensor")


def whole(tensor):
    """A sharded tensor in one piece, on every process; any other value as it is."""
    return tensor.full_tensor() if is_part(tensor) else tensor


def whole_weights(model) -> dict:
    """The whole state dict of a sharded model, on rank 0's CPU. All processes must call it: each holds a part."""
    weights = {}
    for name, weight in model.state_dict().items():
        weight = whole(weight)
        if rank() == 0:
            weights[name] = weight.cpu()
    return weights


def ordinary_model(model, like):
    """A model that save_pretrained takes: the model itself; if sharded, a whole one on rank 0's CPU, None elsewhere."""
    if not is_sharded(model):
        return model
    weights = whole_weights(model)
    if rank() > 0:
        return None
    plain = type(like)(model.config).float()
    plain.load_state_dict(weights)
    plain.generation_config = like.generation_config
    return plain


@contextlib.contextmanager
def policy_to_sample(model, sampler):
    """A model that samples as the policy does: a sharded policy cannot sample, so it lends the sampler its weights."""
    if not is_sharded(model):
        yield model
        return
    stale = {name: weight.to("cpu", copy=True) for name, weight in sampler.state_dict().items()}
    copy_weights(model, sampler)
    yield sampler
    sampler.load_state_dict(stale)


@torch.no_grad()
def copy_weights(source, target) -> None:
    """Copy the weights of `source` into `target`, an unsharded model, one tensor at a time.

    The numbers are copied: a sampler that shared the policy's tensors would follow each update, and never be stale.
    """
    destination = target.state_dict()
    for name, weight in source.state_dict().items():
        if is_sharded(source) or destination[name].data_ptr() != weight.data_ptr():  # LoRA shares frozen weights
            destination[name].copy_(whole(weight))


def optimizer_state(optimizer) -> dict:
    """optimizer.state_dict(); a sharded tensor is whole, on rank 0's CPU, and None on the other processes."""
    def collect(leaf):
        if not is_part(leaf):
            return leaf
        leaf = leaf.full_tensor()  # one at a time, and all processes take part
        return leaf.cpu() if rank() == 0 else None
    return tree_map(collect, optimizer.state_dict())


def load_optimizer_state(optimizer, state: dict) -> None:
    """Load what optimizer_state gave, and split it as the parameters are split."""
    parameters = [parameter for group in optimizer.param_groups for parameter in group["params"]]
    for i, values in state["state"].items():
        if is_part(parameters[i]):
            from torch.distributed.tensor import distribute_tensor
            mesh, placements = parameters[i].device_mesh, parameters[i].placements
            values |= {name: distribute_tensor(value.to(mesh.device_type), mesh, placements)
                       for name, value in values.items() if value.shape == parameters[i].shape}
    optimizer.load_state_dict(state)
