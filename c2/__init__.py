"""The Composer 2 training system: models, data, losses, training and evaluation."""
