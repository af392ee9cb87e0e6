"""scikit-learn: models that learn batch by batch, and searches in its style."""
