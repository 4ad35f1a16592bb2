"""Rows and a reward in TRL's form, for both programs: responses should repeat the letter of their prompt."""

ROWS = [{"prompt": letter, "letter": letter} for letter in "abcdefgh"]


def repeats(completions, letter, **columns):
    """Return the share of each completion that is the letter of its row, as TRL's reward functions do."""
    return [text.count(one) / max(len(text), 1) for text, one in zip(completions, letter, strict=True)]


def reward(prompts, responses, rows):
    """Call a reward of TRL: the columns of the rows are its keywords."""
    return repeats(completions=responses, letter=[row["letter"] for row in rows])
