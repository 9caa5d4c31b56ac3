# The tests of ctest. The C++ tests are three processes: most tests keep one core busy, and a process for each test
# would start CUDA each time. Two processes would be unequal, because every other test needs a GPU and is skipped
# without one. The large tests, named Slow, run alone: two at once may need more memory than there is. tools/run_tests
# counts the tests that each program reports.
foreach(shard 0 1 2)
  add_test(NAME cpp_${shard} COMMAND eaves_tests --gtest_filter=-*Slow*)
  set_tests_properties(cpp_${shard} PROPERTIES ENVIRONMENT "GTEST_TOTAL_SHARDS=3;GTEST_SHARD_INDEX=${shard}")
endforeach()
add_test(NAME cpp_slow COMMAND eaves_tests --gtest_filter=*Slow*)
set_tests_properties(cpp_slow PROPERTIES RUN_SERIAL ON)
# Products as oneDNN computes them on a machine without AVX-512. Tests have the levels of eaves' own vectors as
# parameters.
add_test(NAME cpp_gemm_of_avx2 COMMAND eaves_tests --gtest_filter=CpuGemmByOneDnn.*)
set_tests_properties(cpp_gemm_of_avx2 PROPERTIES ENVIRONMENT ONEDNN_MAX_CPU_ISA=AVX2)

# Installs into a fresh prefix, then builds examples/cpp against it, like a user's project outside the tree.
add_test(NAME install_and_examples
         COMMAND ${CMAKE_COMMAND} -D BUILD_DIR=${PROJECT_BINARY_DIR} -D SOURCE_DIR=${PROJECT_SOURCE_DIR} -D
                 GENERATOR=${CMAKE_GENERATOR} -D CXX=${CMAKE_CXX_COMPILER} -P
                 ${PROJECT_SOURCE_DIR}/cmake/install_test.cmake)

# A configuration for another system ends with one sentence.
add_test(NAME other_systems COMMAND ${CMAKE_COMMAND} -S ${PROJECT_SOURCE_DIR} -B ${PROJECT_BINARY_DIR}/other_system -D
                                    CMAKE_SYSTEM_NAME=FreeBSD -D CMAKE_CXX_COMPILER=${CMAKE_CXX_COMPILER})
set_tests_properties(other_systems PROPERTIES PASS_REGULAR_EXPRESSION "eaves needs Linux, but this system is FreeBSD")

# Tests in Python. tools/setup puts the packages that they need into .venv.
set(python ${PROJECT_SOURCE_DIR}/.venv/bin/python)
if(NOT EXISTS ${python})
  find_program(EAVES_PYTHON NAMES python3)
  set(python ${EAVES_PYTHON})
endif()
if(python)
  add_test(NAME check_docs_test COMMAND ${python} -B tools/check_docs_test.py WORKING_DIRECTORY ${PROJECT_SOURCE_DIR})
  add_test(NAME run_tests_test COMMAND ${python} -B tools/run_tests_test.py WORKING_DIRECTORY ${PROJECT_SOURCE_DIR})
  add_test(NAME site_pages_test COMMAND ${python} -B tools/site_pages_test.py WORKING_DIRECTORY ${PROJECT_SOURCE_DIR})
  add_test(NAME test_integrations_test COMMAND ${python} -B tools/test_integrations_test.py WORKING_DIRECTORY ${PROJECT_SOURCE_DIR})
  add_test(NAME test_newest_torch_test COMMAND ${python} -B tools/test_newest_torch_test.py WORKING_DIRECTORY ${PROJECT_SOURCE_DIR})
  # The tests of the Python package as tools/wheel has installed it, never of the sources.
  add_test(NAME python COMMAND ${python} -B -m pytest -n auto WORKING_DIRECTORY ${PROJECT_SOURCE_DIR})
  # pytest takes every core for itself.
  cmake_host_system_information(RESULT cores QUERY NUMBER_OF_LOGICAL_CORES)
  set_tests_properties(python PROPERTIES PROCESSORS ${cores})
  add_test(NAME check_docs COMMAND ${python} -B tools/check_docs --program $<TARGET_FILE:eaves_cli>
           WORKING_DIRECTORY ${PROJECT_SOURCE_DIR})
  set_tests_properties(check_docs PROPERTIES COST 1000)  # takes long on one core, so it begins first
else()
  message(STATUS "eaves: found no Python: the tests in Python are left out")
endif()
