"""One file per runtime, each in the words of the runtime itself, over one training-step driver."""
