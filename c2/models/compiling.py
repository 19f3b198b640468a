"""What XLA is told about every program that trains or samples, whatever it runs on."""

# Else XLA leaves out roundings to bf16 where fusion lets it, in every program other ones, and an
# engine's numbers are further from the trainer's than they need be.
ROUND_AS_WRITTEN = {"xla_allow_excess_precision": False}
