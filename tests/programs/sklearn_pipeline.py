"""A pipeline that learns by batch, as in scikit-learn's guide to large data."""

from sklearn.datasets import load_digits
from sklearn.linear_model import SGDClassifier
from sklearn.pipeline import make_pipeline
from sklearn.preprocessing import StandardScaler

import cerebro

X, y = load_digits(return_X_y=True)


def build(config):
    return make_pipeline(
        StandardScaler(), SGDClassifier(loss="log_loss", alpha=config["alpha"], random_state=0)
    )


if __name__ == "__main__":
    # Instead of the loop: for batch in batches: model.partial_fit(...)
    space = {"alpha": [1e-4, 1e-2], "batch_size": 64}  # Cerebro
    result = cerebro.search(
        build, space, (X, y), epochs=3, validation=0.2, searcher="grid", metric="accuracy"
    )  # Cerebro
    print(result)
