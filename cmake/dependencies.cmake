# The libraries that eaves needs, from the system's package manager (tools/setup installs them). The library needs
# Highway, and OpenMP outside of the extension of PyTorch, which brings its own threads. The program, the tests and the
# extension's report of the system need the rest.
find_package(hwy CONFIG REQUIRED)

if(NOT EAVES_BUILD_PYTHON)
  # FindOpenMP names the runtime as a file, so that the archive can replace the shared library.
  if(EAVES_RELOCATABLE)
    execute_process(COMMAND ${CMAKE_CXX_COMPILER} -print-file-name=libgomp.a OUTPUT_VARIABLE libgomp
                    OUTPUT_STRIP_TRAILING_WHITESPACE ERROR_QUIET)
    if(EXISTS "${libgomp}")  # a compiler without the archive echoes the bare name
      set(OpenMP_gomp_LIBRARY ${libgomp} CACHE FILEPATH "GNU OpenMP runtime")
    endif()
  endif()
  find_package(OpenMP REQUIRED COMPONENTS CXX)
endif()

if(EAVES_BUILD_PROGRAMS OR EAVES_BUILD_PYTHON)
  find_package(fmt CONFIG REQUIRED)
  find_package(nlohmann_json CONFIG REQUIRED)
endif()
if(EAVES_BUILD_PROGRAMS)
  find_package(CLI11 CONFIG REQUIRED)
  find_package(GTest REQUIRED)
endif()

# eaves_make_relocatable(<program>): lets a copy of the build folder run on another machine. Distributions have Highway
# as a shared library only. It is copied to lib/ beside the programs, which look there first.
function(eaves_make_relocatable program)
  set_target_properties(
    ${program} PROPERTIES RUNTIME_OUTPUT_DIRECTORY ${PROJECT_BINARY_DIR} BUILD_WITH_INSTALL_RPATH ON
                          INSTALL_RPATH "$ORIGIN/lib;$ORIGIN/../${CMAKE_INSTALL_LIBDIR}")
  if(EAVES_RELOCATABLE)
    target_link_options(${program} PRIVATE -static-libstdc++ -static-libgcc)
  endif()
  get_target_property(type hwy::hwy TYPE)
  if(type STREQUAL "SHARED_LIBRARY")
    add_custom_command(
      TARGET ${program} POST_BUILD
      COMMAND ${CMAKE_COMMAND} -E make_directory ${PROJECT_BINARY_DIR}/lib
      COMMAND ${CMAKE_COMMAND} -E copy_if_different $<TARGET_FILE:hwy::hwy>
              ${PROJECT_BINARY_DIR}/lib/$<TARGET_SONAME_FILE_NAME:hwy::hwy>
      VERBATIM)
  endif()
endfunction()
