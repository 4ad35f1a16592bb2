"""Rows and a reward in TRL's form, for both programs: responses should be vowels."""

ROWS = [{"prompt": letter, "wanted": "aeiou"} for letter in "abcdefgh"]


def share(completions, wanted, **columns):
    """Return the share of each completion that is wanted by its row, as TRL's reward functions do."""
    pairs = zip(completions, wanted, strict=True)
    return [sum(letter in letters for letter in text) / max(len(text), 1) for text, letters in pairs]


def reward(prompts, responses, rows):
    """Call a reward of TRL: the columns of the rows are its keywords."""
    return share(completions=responses, wanted=[row["wanted"] for row in rows])
