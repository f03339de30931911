"""Models: a decoder from a Hugging Face config, over ranks or not, and directories in and out.

What the rest of the package asks of a model is `protocol.LanguageModel`. `build.Decoder` gives it;
docs/models.md says how to add a family.
"""
