"""From a request to the engine's own token ids and block keys, incrementally.

load_prompter -> Prompters.get -> Prompter: plan -> encode -> commit -> Tokens.keys
"""

from router.prompt.loading import load_prompter
from router.prompt.needs_engine import NeedsEngine
from router.prompt.prompter import EncodePlan, Prompter, Tokens
from router.prompt.prompters import Prompters
from router.prompt.renderer import EngineOptions
from router.prompt.trust import TokenTrust

__all__ = [
    "EncodePlan",
    "EngineOptions",
    "NeedsEngine",
    "Prompter",
    "Prompters",
    "TokenTrust",
    "Tokens",
    "load_prompter",
]
