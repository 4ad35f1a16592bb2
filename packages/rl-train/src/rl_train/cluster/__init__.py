"""Actors and critics on a Ray cluster: `RayModelGroup`, `Placement`, `Resources` (import them from `rl_models`).

Empty on purpose: Ray imports `rl_train.cluster.host` on every rank before torch may be, so nothing here imports torch.
"""
