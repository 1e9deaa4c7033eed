import os

for variable in ("OMP_NUM_THREADS", "OPENBLAS_NUM_THREADS", "MKL_NUM_THREADS"):
    os.environ.setdefault(variable, "1")
os.environ.setdefault("HF_HUB_OFFLINE", "1")

from hypothesis import settings  # noqa: E402

settings.register_profile("suite", deadline=None, max_examples=40, derandomize=True)
settings.load_profile("suite")
