"""The contract of adapters for the Keras models of the tests, whatever Keras computes with."""

from keras_models import MODELS, RULES, batch, hooked

from layoutmap.testing.adapter_contract import ScopeContract


class KerasContract(ScopeContract):
    library = "keras"

    def models(self):
        return MODELS

    def rules(self, name):
        return RULES[name]

    def batch(self, name):
        return batch(name)

    def get_array(self, variable):
        return variable.value

    def snapshot_hooks(self):
        return hooked()
