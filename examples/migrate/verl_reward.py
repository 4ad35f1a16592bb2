"""A reward of verl, and the function that rl-train calls: `--reward verl_reward:reward`."""


def compute_score(data_source, solution_str, ground_truth, extra_info=None):
    """Return the score of a response, as verl's custom rewards do."""
    return float(ground_truth in solution_str)


def reward(prompt, response, row):
    """Call it with the columns of the row."""
    return compute_score(row.get("data_source"), response, row["answer"], row.get("extra_info"))
