# cmake -D BUILD_DIR=<built eaves> -D SOURCE_DIR=<tree> -D GENERATOR=<> -D CXX=<> -P install_test.cmake
# Installs, copies examples/cpp out of the tree, builds it with find_package(eaves) alone and runs all of its programs.
set(work ${BUILD_DIR}/install_test)
file(REMOVE_RECURSE ${work})

# Runs in the tree's folder, like the README's commands: train_ngram reads LICENSE there.
function(run)
  execute_process(COMMAND ${ARGN} WORKING_DIRECTORY ${SOURCE_DIR} RESULT_VARIABLE result)
  if(NOT result EQUAL 0)
    list(JOIN ARGN " " command)
    message(FATAL_ERROR "install_test: failed with ${result}: ${command}")
  endif()
endfunction()

run(${CMAKE_COMMAND} --install ${BUILD_DIR} --prefix ${work}/prefix)
file(COPY ${SOURCE_DIR}/examples/cpp/ DESTINATION ${work}/project)
run(${CMAKE_COMMAND} -S ${work}/project -B ${work}/build -G ${GENERATOR} -D CMAKE_CXX_COMPILER=${CXX} -D
    CMAKE_PREFIX_PATH=${work}/prefix -D CMAKE_FIND_USE_PACKAGE_REGISTRY=OFF)
run(${CMAKE_COMMAND} --build ${work}/build)

file(GLOB examples RELATIVE ${SOURCE_DIR}/examples/cpp ${SOURCE_DIR}/examples/cpp/*.cpp)
foreach(example ${examples})
  string(REGEX REPLACE "\\.cpp$" "" program ${example})
  run(${work}/build/${program})
endforeach()
run(${work}/prefix/bin/eaves info)
