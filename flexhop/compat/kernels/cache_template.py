"""The template class of kernels that read a cache, in 2.11 to 2.15."""

from __future__ import annotations

from flexhop.compat.kernels.inductor import Template, TemplateKernel

__all__ = ["CacheTemplate"]


class CacheTemplateKernel(TemplateKernel):
    """Passes dtypes that Triton lacks on the device as bytes."""

    def jit_lines(self) -> str:
        """Inductor's decorator; a missing pointer type in it would be an error."""
        lines = super().jit_lines()
        as_bits = self.meta.get("KEY_AS_BITS") or self.meta.get("VALUE_AS_BITS")
        return lines.replace("*fp8e4nv", "*u8") if as_bits else lines


class CacheTemplate(Template):
    """A template whose kernels are CacheTemplateKernels."""

    kernel_type = CacheTemplateKernel
