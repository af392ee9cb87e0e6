"""Train the trials of an Optuna study with Cerebro: `cerebro.optuna.optimize`.

The study keeps its sampler, pruner, storage and callbacks. The order of ``ask`` and ``tell`` does
not depend on timing (see `cerebro.coordinator.search_loop`), so a seeded sampler gives the same
study with any number of workers. ``build(trial)`` is the first half of an objective: it suggests
hyperparameters and returns a model instead of training it.

    def build(trial):
        net = make_net(trial.suggest_int("layers", 1, 3))
        lr = trial.suggest_float("lr", 1e-4, 1e-1, log=True)
        return cerebro.torch.Model(net, optimizer=torch.optim.Adam(net.parameters(), lr=lr), ...)

    study = optuna.create_study(direction="maximize")
    result = cerebro.optuna.optimize(study, build, train, epochs=10, n_trials=50,
                                     validation=valid, metric="accuracy", batch_size=64)
    study.best_trial.params
"""

from cerebro.integrations.optuna.optimize import optimize

__all__ = ["optimize"]
