# The target jax::ffi: the headers of XLA's foreign function interface, which jaxlib brings. Of the jaxlib of the Python
# that builds (Python_EXECUTABLE), looked up without importing it. Without jaxlib there is no target, and the package is
# built without eaves.jax.
foreach(isolation "" -I)  # as in torch.cmake
  execute_process(
    COMMAND ${Python_EXECUTABLE} ${isolation} ${PROJECT_SOURCE_DIR}/python/find_jaxlib.py
    OUTPUT_VARIABLE jaxlib OUTPUT_STRIP_TRAILING_WHITESPACE ERROR_QUIET RESULT_VARIABLE failed)
  if(NOT failed)
    list(POP_FRONT jaxlib version folder)
    message(STATUS "eaves: jaxlib ${version} (${folder})")
    add_library(jax_ffi INTERFACE)
    add_library(jax::ffi ALIAS jax_ffi)
    target_include_directories(jax_ffi SYSTEM INTERFACE ${folder}/include)
    break()
  endif()
endforeach()
if(failed)
  message(STATUS "eaves: ${Python_EXECUTABLE} has no jaxlib: the wheel has no eaves.jax")
endif()
