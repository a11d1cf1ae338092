"""Why hash ids cannot become text."""


class UnstableTokenizer(ValueError):
    """A tokenizer has too few words that keep their tokens next to one another."""
