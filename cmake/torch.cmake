# The target torch::stable: PyTorch's stable C++ headers and their libraries. They come with the PyTorch of the Python
# that builds (Python_EXECUTABLE), which is looked up without importing it.
#
# The oldest PyTorch that the extension runs under is written in one place, for Python and for CMake.
file(STRINGS python/eaves/_torch/library.py target_line REGEX "^TORCH_TARGET = ")
string(REGEX REPLACE ".*\"(.*)\".*" "\\1" EAVES_TORCH_TARGET "${target_line}")

find_package(Python 3.10 REQUIRED COMPONENTS Interpreter)
# -I comes second: pip builds in an environment of its own, in which only -I finds the user's packages.
foreach(isolation "" -I)
  execute_process(
    COMMAND ${Python_EXECUTABLE} ${isolation} ${PROJECT_SOURCE_DIR}/python/find_torch.py
    OUTPUT_VARIABLE torch OUTPUT_STRIP_TRAILING_WHITESPACE ERROR_QUIET RESULT_VARIABLE failed)
  if(NOT failed)
    break()
  endif()
endforeach()
if(failed)
  message(FATAL_ERROR "eaves: ${Python_EXECUTABLE} has no PyTorch: install torch ${EAVES_TORCH_TARGET} or newer.")
endif()
list(POP_FRONT torch EAVES_TORCH_VERSION torch_folder)
if(EAVES_TORCH_VERSION VERSION_LESS EAVES_TORCH_TARGET)
  message(FATAL_ERROR "eaves: PyTorch ${EAVES_TORCH_VERSION} (${torch_folder}) is too old: install "
                      "${EAVES_TORCH_TARGET} or newer.")
endif()
message(STATUS "eaves: PyTorch ${EAVES_TORCH_VERSION} (${torch_folder})")

add_library(torch_stable INTERFACE)
add_library(torch::stable ALIAS torch_stable)
target_include_directories(torch_stable SYSTEM INTERFACE ${torch_folder}/include)
target_link_directories(torch_stable INTERFACE ${torch_folder}/lib)
# No path to these is recorded, because torch loads both before it loads the extension.
target_link_libraries(torch_stable INTERFACE torch_cpu c10 ${CMAKE_DL_LIBS})
string(REGEX MATCH "^([0-9]+)\\.([0-9]+)$" version ${EAVES_TORCH_TARGET})
math(EXPR target "(${CMAKE_MATCH_1} << 56) | (${CMAKE_MATCH_2} << 48)" OUTPUT_FORMAT HEXADECIMAL)
# Messages name PyTorch's files without the path on the machine that builds.
target_compile_options(
  torch_stable INTERFACE -ffile-prefix-map=${torch_folder}/include/= -ffile-prefix-map=${PROJECT_SOURCE_DIR}/=)
target_compile_definitions(torch_stable INTERFACE TORCH_TARGET_VERSION=${target}ULL)

# eaves_install_library(<target>): into the package, beside the libraries that it loads.
function(eaves_install_library target)
  set_target_properties(${target} PROPERTIES BUILD_WITH_INSTALL_RPATH ON INSTALL_RPATH "$ORIGIN")
  # The symbols of the static libraries stay hidden, because another extension may bring the same libraries. A symbol
  # that is missing fails here, and not when Python loads the library.
  target_link_options(${target} PRIVATE -Wl,--exclude-libs,ALL -Wl,--no-undefined)
  install(TARGETS ${target} LIBRARY DESTINATION eaves COMPONENT python)
endfunction()

# eaves_install_extension(<target>): into the package, with Highway beside it if that is a shared library.
function(eaves_install_extension target)
  eaves_install_library(${target})
  get_target_property(type hwy::hwy TYPE)
  if(type STREQUAL "SHARED_LIBRARY")
    install(FILES $<TARGET_FILE:hwy::hwy> DESTINATION eaves COMPONENT python
            RENAME $<TARGET_SONAME_FILE_NAME:hwy::hwy>)
    # Highway's licence comes along, from the place of Debian and Ubuntu.
    install(FILES /usr/share/doc/libhwy-dev/copyright DESTINATION eaves COMPONENT python RENAME libhwy-copyright
            OPTIONAL)
  endif()
  # The licence of nlohmann-json too, whose headers are compiled in.
  install(FILES /usr/share/doc/nlohmann-json3-dev/copyright DESTINATION eaves COMPONENT python
          RENAME nlohmann-json-copyright OPTIONAL)
  # Code from CUTLASS' headers brings their licence, from the wheel nvidia-cutlass or from CUTLASS' sources.
  if(EAVES_HAVE_CUTLASS OR EAVES_HAVE_SM100)
    file(GLOB cutlass_licence ${EAVES_CUTLASS_INCLUDE}/../../../nvidia_cutlass-*.dist-info/licenses/LICENSE.txt
         ${EAVES_CUTLASS_INCLUDE}/../LICENSE.txt)
    install(FILES ${cutlass_licence} DESTINATION eaves COMPONENT python RENAME cutlass-LICENSE.txt OPTIONAL)
  endif()
  # oneDNN multiplies matrices on the CPU; the extension loads it from its own folder when it is needed. The library
  # comes from a package of the Python that builds. Without the package the extension uses the system's oneDNN, or its
  # own loops. auditwheel adds the libgomp that oneDNN needs, and libgomp's licence comes along.
  foreach(isolation "" -I)
    execute_process(
      COMMAND ${Python_EXECUTABLE} ${isolation} ${PROJECT_SOURCE_DIR}/python/find_onednn.py
      OUTPUT_VARIABLE files OUTPUT_STRIP_TRAILING_WHITESPACE ERROR_QUIET RESULT_VARIABLE failed)
    if(NOT failed)
      list(POP_FRONT files library)
      install(PROGRAMS ${library} DESTINATION eaves COMPONENT python)
      install(FILES /usr/share/doc/libgomp1/copyright DESTINATION eaves COMPONENT python RENAME libgomp-copyright
              OPTIONAL)
      foreach(file ${files})
        get_filename_component(name ${file} NAME)
        install(FILES ${file} DESTINATION eaves COMPONENT python RENAME libdnnl-${name})
      endforeach()
      break()
    endif()
  endforeach()
  if(failed)
    message(STATUS "eaves: ${Python_EXECUTABLE} has no package onednn-cpu-gomp: the wheel has no oneDNN")
  endif()
endfunction()
