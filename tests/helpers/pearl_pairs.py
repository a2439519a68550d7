"""A target, drafts of three qualities, and PEARL over them."""

import copy
import threading

from close_drafts import close_to
from models import VOCAB, llama, prompts

from hf_specdec.drafters.pearl import PearlDrafter

TARGET = llama(seed=1)
DRAFTS = {"good": close_to(TARGET, 0.01), "middling": close_to(TARGET, 0.05), "bad": llama(seed=9)}


def pearl(draft=DRAFTS["middling"], **options):
    return PearlDrafter(draft, **{"worker": "thread"} | options)


def workers_in_threads():
    """Threads of this process in which a draft works."""
    return [thread for thread in threading.enumerate() if thread.name == "hf_specdec worker"]


def generate(drafter=None, lengths=(7,), target=TARGET, **options):
    options = {"max_new_tokens": 24, "do_sample": False, "pad_token_id": 0} | options
    return target.generate(**prompts(list(lengths), seed=4), assistant_model=drafter, **options)


def second_best(model):
    """A draft whose likeliest token is never the model's, its second one always."""

    def disturb(module, inputs, outputs):
        best = outputs.logits.argmax(-1, keepdim=True)
        worse = (best + 1) % VOCAB
        outputs.logits = outputs.logits.scatter(-1, worse, outputs.logits.gather(-1, best) + 1)

    draft = copy.deepcopy(model)
    draft.register_forward_hook(disturb)
    return draft
