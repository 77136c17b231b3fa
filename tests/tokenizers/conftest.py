import tests.same_cases  # noqa: F401 - loads the profile
