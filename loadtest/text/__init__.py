"""What hash ids say when they are sent: equal ids, equal tokens, of any tokenizer."""

from loadtest.text.errors import UnstableTokenizer
from loadtest.text.prompts import Prompts, salted
from loadtest.text.vocabulary import Vocabulary, of_range, of_tokenizer

__all__ = ["Prompts", "UnstableTokenizer", "Vocabulary", "of_range", "of_tokenizer", "salted"]
