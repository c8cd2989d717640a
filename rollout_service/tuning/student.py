"""Bands of means of few values, whose own spread is estimated from those few (Student, Biometrika 6, 1908)."""

# t with P(|T| <= t) = 0.95, for 1, 2, … degrees of freedom: NIST/SEMATECH e-Handbook of Statistical Methods, 1.3.6.7.2.
T_95 = (12.706, 4.303, 3.182, 2.776, 2.571, 2.447, 2.365, 2.306, 2.262, 2.228, 2.201, 2.179, 2.160, 2.145, 2.131)


def t_95(num_values: int) -> float:
    """Standard errors to each side in a band of 95 %. With more values than the table has it is a hair too wide."""
    if num_values < 2:
        raise ValueError("the spread of one value is not known")
    return T_95[min(num_values - 1, len(T_95)) - 1]
