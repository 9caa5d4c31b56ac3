"""Hugging Face models that train with eaves.linear_cross_entropy as their head and loss.

    eaves.hf.patch(model)         for a language model of transformers, or a PEFT model around one
    eaves.hf.unpatch(model)       as it was
    with eaves.hf.patched(model): both
    eaves.hf.install()            for the model of every Trainer that is made; uninstall() and is_active() beside it

No architecture is named here. In a call that wants the loss and no logits, the head gives `DeferredLogits`: the hidden
states, and what the model's own forward then does to the logits. A loss that is reached with nothing but factors and a
soft cap is linear_cross_entropy with these. Whatever else is done to them is done to a tensor, which is computed then:
that costs memory, and says so, but nothing is dropped.

Model and head get another class, and nothing in the instance of the model wraps a function around itself: copies,
pickles and replicas of a patched model call their own parameters, and unpatching gives the class back.
"""

from eaves.hf.models import patch, patched, unpatch
from eaves.hf.trainer import install, is_active, uninstall

__all__ = ["install", "is_active", "patch", "patched", "uninstall", "unpatch"]
