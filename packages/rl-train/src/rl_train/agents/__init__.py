"""Agents: programs of the user that draw from the policy by the endpoint of a run (`rl_train.gateway`)."""
