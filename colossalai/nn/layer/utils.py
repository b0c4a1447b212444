from colossalai.utils.errors import ConfigError


def divide(numerator: int, denominator: int) -> int:
    """``numerator / denominator`` where that is a whole number; ConfigError (an AssertionError) where it is not."""
    if denominator == 0 or numerator % denominator != 0:
        raise ConfigError(f"{numerator} is not divisible by {denominator}")
    return numerator // denominator
