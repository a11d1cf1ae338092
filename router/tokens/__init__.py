"""From a request to the engine's own token ids and block keys, incrementally.

load_prompter -> Prompters.get -> Prompter: plan -> encode -> commit -> Tokens.keys
"""

from router.tokens.loading import load_prompter
from router.tokens.needs_engine import NeedsEngine
from router.tokens.prompt_tree import EncodePlan, Tokens
from router.tokens.prompter import Prompter, Prompters
from router.tokens.trust import TokenTrust

__all__ = [
    "EncodePlan",
    "NeedsEngine",
    "Prompter",
    "Prompters",
    "TokenTrust",
    "Tokens",
    "load_prompter",
]
