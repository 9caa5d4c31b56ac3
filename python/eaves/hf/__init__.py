"""Hugging Face models that train with eaves.linear_cross_entropy as their head and loss.

    eaves.hf.patch(model)         for a language model of transformers, or a PEFT model around one
    eaves.hf.unpatch(model)       undoes it
    with eaves.hf.patched(model): both
    eaves.hf.install()            patches the model of every Trainer that is made; see also uninstall() and is_active()

No architecture is named here. In a call that wants the loss and no logits, the head returns `DeferredLogits`: the
hidden states, and a record of the operations that the model's own forward applies to the logits. If these are only
factors and a soft cap, the loss is linear_cross_entropy with them. Any other operation gets a tensor, which is computed
then: it costs memory, with a warning, but no operation is dropped.

Model and head get another class, and no function wraps a method of the model's instance. So copies, pickles and
replicas of a patched model call their own parameters, and unpatching restores the class.
"""

from eaves.hf.models import patch, patched, unpatch
from eaves.hf.trainer import install, is_active, uninstall

__all__ = ["install", "is_active", "patch", "patched", "uninstall", "unpatch"]
