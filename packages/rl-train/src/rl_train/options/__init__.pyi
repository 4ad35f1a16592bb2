from rl_train.options.options import (
    CriticOptions as CriticOptions,
    DataOptions as DataOptions,
    EvaluationOptions as EvaluationOptions,
    ImportanceOptions as ImportanceOptions,
    ObjectiveOptions as ObjectiveOptions,
    RewardOptions as RewardOptions,
    RolloutOptions as RolloutOptions,
    TrainOptions as TrainOptions,
)
