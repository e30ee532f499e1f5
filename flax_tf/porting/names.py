"""Names of PyTorch keys: the wrappers that training tools put around a model, and how to take them off."""

import logging
from collections import Counter
from collections.abc import Collection, Iterable

logger = logging.getLogger("flax_tf")

# Put in by torch.compile, FSDP and activation checkpointing, at any depth; never a user's attribute.
_ANYWHERE = ("_orig_mod", "_fsdp_wrapped_module", "_checkpoint_wrapped_module")
# Put in front by DataParallel and DDP (`module`) and by Lightning modules (`model`); could be a user's attribute.
_LEADING = ("module", "model")


def strip_wrappers(keys: Iterable[str], expected: Collection[str] = ()) -> dict[str, str]:
    """Maps every key to itself without wrapper prefixes, and logs what was stripped.

    A leading `module.` or `model.` stays where a name in `expected` begins with it. Two keys may map to one name; the
    caller reports that as a duplicate.
    """
    own = {name.split(".", 1)[0] for name in expected}
    stripped: Counter[str] = Counter()

    def bare(key: str) -> str:
        kept, wrappers = [], set()
        for part in key.split("."):
            if part in _ANYWHERE or (not kept and part in _LEADING and part not in own):
                wrappers.add(part)
            else:
                kept.append(part)
        stripped.update(wrappers)
        return ".".join(kept)

    names = {key: bare(key) for key in keys}
    for part, count in sorted(stripped.items()):
        logger.warning("stripped the wrapper prefix '%s.' from %d of %d keys", part, count, len(names))
    return names
