# Decides whether the CUDA backend is built, by which toolkit and for which GPUs. Sets EAVES_HAVE_CUDA (0 or 1),
# EAVES_CUDA_VERSION and EAVES_CUDA_ARCHITECTURES, and enables the language. EAVES_CUDA=AUTO goes without CUDA if there
# is no toolkit. A toolkit that is too old is an error, because its owner expects a GPU backend.
set(EAVES_CUDA_MINIMUM 12.4)

# An environment variable of this name is the default, so that builds within a test compile nothing for other GPUs.
set(default_targets native)
if(NOT "$ENV{EAVES_CUDA_TARGETS}" STREQUAL "")
  set(default_targets $ENV{EAVES_CUDA_TARGETS})
endif()
set(EAVES_CUDA_TARGETS ${default_targets} CACHE STRING
    "GPUs to compile for: native (those of this machine, else sm_90a), all, or a list as CMAKE_CUDA_ARCHITECTURES")

# eaves_cuda_targets(<variable>): EAVES_CUDA_TARGETS as a list for CMAKE_CUDA_ARCHITECTURES, each with -real (machine
# code) or -virtual (PTX, which the driver compiles).
function(eaves_cuda_targets variable)
  set(targets ${EAVES_CUDA_TARGETS})
  if(targets STREQUAL "all")
    # sm_80 machine code runs on every GPU of compute capability 8.x, sm_90a (with the Hopper-only instructions) on 9.0
    # alone, sm_100 on 10.x, sm_120 on 12.x. The driver compiles the PTX for later GPUs: compute_90, because it has
    # clusters and bulk copies, and because PTX for 90a would run on 9.0 alone.
    set(targets 80-real 90a-real ${eaves_blackwell} 90-virtual)
  elseif(targets STREQUAL "native")
    execute_process(COMMAND nvidia-smi --query-gpu=compute_cap --format=csv,noheader OUTPUT_VARIABLE lines
                    RESULT_VARIABLE status ERROR_QUIET)
    set(targets "")
    if(status EQUAL 0)
      string(REGEX REPLACE "\r?\n" ";" lines "${lines}")
    else()
      set(lines "")  # nvidia-smi prints its errors there too
    endif()
    foreach(line ${lines})
      if(NOT line MATCHES "^[0-9]+\\.[0-9]$" OR line VERSION_LESS 8.0)
        continue()
      elseif(line VERSION_GREATER 9.0)
        string(REGEX REPLACE "^([0-9]+)\\..*" "\\10-real" target ${line})
        if(NOT target IN_LIST eaves_blackwell)
          set(target 90-virtual)
        endif()
        list(APPEND targets ${target})
      elseif(line VERSION_EQUAL 9.0)
        list(APPEND targets 90a-real)
      else()
        string(REPLACE "." "" target ${line})
        list(APPEND targets ${target}-real)
      endif()
    endforeach()
    list(REMOVE_DUPLICATES targets)
    if(NOT targets)
      set(targets 90a-real)
    endif()
  else()
    list(TRANSFORM targets APPEND -real REGEX "^[0-9]+[a-z]?$")
    foreach(target ${targets})
      # The host launches kernels with clusters on every GPU that has them, and older PTX lacks the body of these
      # kernels.
      if(target MATCHES "^([0-9]+)[a-z]?-virtual$" AND CMAKE_MATCH_1 LESS 90)
        message(FATAL_ERROR "eaves: EAVES_CUDA_TARGETS has ${target}: expected PTX of 90 or newer, because GPUs of "
                            "compute capability 9.0 and newer run kernels that older PTX lacks.")
      elseif(NOT target MATCHES "^[0-9]+[a-z]?-(real|virtual)$")
        message(FATAL_ERROR "eaves: EAVES_CUDA_TARGETS has \"${target}\", expected native, all, or a list such as "
                            "80-real;90-virtual.")
      endif()
    endforeach()
  endif()
  set(${variable} ${targets} PARENT_SCOPE)
endfunction()

set(EAVES_HAVE_CUDA 0)
set(EAVES_HAVE_CUTLASS 0)
set(EAVES_HAVE_SM100 0)
set(EAVES_CUDA_VERSION "")
set(EAVES_CUDA_ARCHITECTURES "")

# eaves_without_cuda(<why>): one line, then the build goes on for the CPU; an error if CUDA was asked for.
function(eaves_without_cuda why)
  if(EAVES_CUDA STREQUAL "AUTO")
    message(STATUS "eaves: ${why}: building the CPU backend alone")
  else()
    message(FATAL_ERROR "eaves: ${why}: install CUDA ${EAVES_CUDA_MINIMUM} or newer and put its nvcc on PATH, "
                        "or configure with -DEAVES_CUDA=OFF.")
  endif()
endfunction()

if(NOT EAVES_CUDA)
  message(STATUS "eaves: EAVES_CUDA is OFF: building the CPU backend alone")
  return()
endif()

find_package(CUDAToolkit QUIET)
if(NOT CUDAToolkit_FOUND OR NOT CUDAToolkit_NVCC_EXECUTABLE)
  eaves_without_cuda("no CUDA toolkit found")
  return()
endif()
if(CUDAToolkit_VERSION VERSION_LESS EAVES_CUDA_MINIMUM)
  message(FATAL_ERROR "eaves: the CUDA toolkit ${CUDAToolkit_VERSION} (${CUDAToolkit_NVCC_EXECUTABLE}) is too old: "
                      "install CUDA ${EAVES_CUDA_MINIMUM} or newer and put its nvcc on PATH, or configure with "
                      "-DEAVES_CUDA=OFF.")
endif()

set(eaves_blackwell "")
if(CUDAToolkit_VERSION VERSION_GREATER_EQUAL 12.8)
  set(eaves_blackwell 100-real 120-real)
endif()
# A trial, because the toolkit may not support a host compiler as new as this one.
eaves_cuda_targets(CMAKE_CUDA_ARCHITECTURES)
if(NOT CMAKE_CUDA_COMPILER AND NOT DEFINED ENV{CUDACXX})
  set(ENV{CUDACXX} ${CUDAToolkit_NVCC_EXECUTABLE})
endif()
if(NOT CMAKE_CUDA_HOST_COMPILER AND NOT DEFINED ENV{CUDAHOSTCXX})
  # GCC's real name: to a compiler cache, c++ and g++ would be two compilers.
  file(REAL_PATH ${CMAKE_CXX_COMPILER} host_compiler)
  if(NOT host_compiler MATCHES "g\\+\\+[^/]*$")
    set(host_compiler ${CMAKE_CXX_COMPILER})
  endif()
  set(ENV{CUDAHOSTCXX} ${host_compiler})
endif()
include(CheckLanguage)
check_language(CUDA)
if(NOT CMAKE_CUDA_COMPILER)
  eaves_without_cuda("the CUDA toolkit ${CUDAToolkit_VERSION} does not work with ${CMAKE_CXX_COMPILER}")
  return()
endif()
enable_language(CUDA)
set(CMAKE_INCLUDE_SYSTEM_FLAG_CUDA "-isystem ")  # CMake has "-isystem=", which ccache does not take for a path

# CMake 3.25 does not know that nvcc has C++20.
foreach(kind STANDARD EXTENSION)
  if(NOT CMAKE_CUDA20_${kind}_COMPILE_OPTION)
    set(CMAKE_CUDA20_${kind}_COMPILE_OPTION -std=c++20)
  endif()
endforeach()
set(CMAKE_CUDA_STANDARD 20)
set(CMAKE_CUDA_STANDARD_REQUIRED ON)
set(CMAKE_CUDA_EXTENSIONS OFF)
set(CMAKE_CUDA_VISIBILITY_PRESET hidden)
set(CMAKE_CUDA_RUNTIME_LIBRARY Static)

set(EAVES_HAVE_CUDA 1)
set(EAVES_CUDA_VERSION ${CUDAToolkit_VERSION_MAJOR}.${CUDAToolkit_VERSION_MINOR})
# For people, and for src/cuda/architectures.h: 90a is machine code, 90+ is PTX.
set(EAVES_CUDA_ARCHITECTURES ${CMAKE_CUDA_ARCHITECTURES})
list(TRANSFORM EAVES_CUDA_ARCHITECTURES REPLACE "-real$" "")
list(TRANSFORM EAVES_CUDA_ARCHITECTURES REPLACE "-virtual$" "+")

# The headers of CUTLASS, for products that end in exponentials, on Hopper and Blackwell (10.x; nvcc from 12.9 on).
# tools/setup unpacks them from the wheel nvidia-cutlass; older versions of it installed that wheel. Without them
# linear_cross_entropy keeps its logits in memory.
set(EAVES_TAKES_SM100 OFF)
if("90a-real" IN_LIST CMAKE_CUDA_ARCHITECTURES OR "100-real" IN_LIST CMAKE_CUDA_ARCHITECTURES)
  set(prefixes ${PROJECT_SOURCE_DIR}/.venv)
  if(Python_EXECUTABLE)  # the Python that builds a wheel, perhaps another one
    get_filename_component(bin ${Python_EXECUTABLE} DIRECTORY)
    list(APPEND prefixes ${bin}/..)
  endif()
  set(cutlass_of_wheel ${prefixes})
  list(TRANSFORM cutlass_of_wheel APPEND /cutlass/cutlass_library/source/include)
  list(TRANSFORM prefixes APPEND /lib/python3*/site-packages/cutlass_library/source/include)
  file(GLOB cutlass_of_wheel ${cutlass_of_wheel} ${prefixes})
  if(NOT EXISTS "${EAVES_CUTLASS_INCLUDE}/cutlass/version.h")  # not looked for yet, or in a .venv that is gone
    unset(EAVES_CUTLASS_INCLUDE CACHE)
  endif()
  find_path(EAVES_CUTLASS_INCLUDE cutlass/gemm/collective/collective_builder.hpp HINTS ${cutlass_of_wheel}
            DOC "Headers of CUTLASS 4")
  set(cutlass_major 0)
  if(EAVES_CUTLASS_INCLUDE)
    file(STRINGS ${EAVES_CUTLASS_INCLUDE}/cutlass/version.h cutlass_major REGEX "#define CUTLASS_MAJOR ")
    string(REGEX REPLACE "[^0-9]" "" cutlass_major "${cutlass_major}")
  endif()
  if(cutlass_major EQUAL 4)
    if("90a-real" IN_LIST CMAKE_CUDA_ARCHITECTURES)
      set(EAVES_HAVE_CUTLASS 1)
    endif()
    if(CUDAToolkit_VERSION VERSION_GREATER_EQUAL 12.9)
      set(EAVES_TAKES_SM100 ON)
      if("100-real" IN_LIST CMAKE_CUDA_ARCHITECTURES)
        set(EAVES_HAVE_SM100 1)
      endif()
    endif()
  else()
    message(STATUS "eaves: no headers of CUTLASS 4 (tools/setup installs them): linear_cross_entropy keeps logits in memory")
  endif()
endif()
