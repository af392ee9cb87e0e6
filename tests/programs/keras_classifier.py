"""A compiled Keras model, as in Keras' introduction."""

import keras
from sklearn.datasets import load_digits

import cerebro

digits = load_digits()
x_train, y_train = digits.data[:1500].astype("float32") / 16, digits.target[:1500]
x_val, y_val = digits.data[1500:].astype("float32") / 16, digits.target[1500:]


def build(config):
    model = keras.Sequential(
        [
            keras.layers.Input((64,)),
            keras.layers.Dense(config["units"], activation="relu"),
            keras.layers.Dense(10),
        ]
    )
    model.compile(
        optimizer=keras.optimizers.Adam(config["lr"]),
        loss=keras.losses.SparseCategoricalCrossentropy(from_logits=True),
        metrics=["accuracy"],
    )
    return model


if __name__ == "__main__":
    # Instead of model.fit(x_train, y_train, batch_size=32, epochs=3, validation_data=...)
    space = {"units": [16, 32], "lr": [1e-2, 1e-3], "batch_size": 32}  # Cerebro
    result = cerebro.search(
        build,
        space,
        (x_train, y_train),
        epochs=3,
        validation=(x_val, y_val),
        searcher="grid",
        metric="accuracy",
    )  # Cerebro
    print(result)
