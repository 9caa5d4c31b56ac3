# The target jax::ffi: the headers of XLA's foreign function interface. They come with the jaxlib of the Python that
# builds (Python_EXECUTABLE), which is looked up without importing it. Without jaxlib, or with one that is too old,
# there is no target, and the package is built without eaves.jax.
#
# The oldest jaxlib that the library runs under is written in one place, for Python and for CMake.
file(STRINGS python/eaves/jax/_library.py target_line REGEX "^JAX_TARGET = ")
string(REGEX REPLACE "^[^\"]*\"([^\"]*)\".*" "\\1" EAVES_JAX_TARGET "${target_line}")

foreach(isolation "" -I)  # as in torch.cmake
  execute_process(
    COMMAND ${Python_EXECUTABLE} ${isolation} ${PROJECT_SOURCE_DIR}/python/find_jaxlib.py
    OUTPUT_VARIABLE jaxlib OUTPUT_STRIP_TRAILING_WHITESPACE ERROR_QUIET RESULT_VARIABLE failed)
  if(NOT failed)
    list(POP_FRONT jaxlib version folder)
    if(version VERSION_LESS EAVES_JAX_TARGET)
      message(WARNING "eaves: jaxlib ${version} (${folder}) is older than ${EAVES_JAX_TARGET}: the wheel has no eaves.jax")
      break()
    endif()
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
