"""NNI's front end: a training service that NNI 3.0 takes trials to, and what its trials talk through."""
