package podresources

import (
	"context"
	"net"
	"os"
	"path/filepath"
	"testing"

	"github.com/google/go-cmp/cmp"
	"google.golang.org/grpc"
	podresourcesapi "k8s.io/kubelet/pkg/apis/podresources/v1"
)

type fakeKubelet struct {
	podresourcesapi.UnimplementedPodResourcesListerServer
	answer *podresourcesapi.ListPodResourcesResponse
}

func (f *fakeKubelet) List(context.Context, *podresourcesapi.ListPodResourcesRequest) (*podresourcesapi.ListPodResourcesResponse, error) {
	return f.answer, nil
}

func TestListJoinsTheNUMANodesOfOneResource(t *testing.T) {
	device := func(resource string, ids ...string) *podresourcesapi.ContainerDevices {
		return &podresourcesapi.ContainerDevices{ResourceName: resource, DeviceIds: ids}
	}
	kubelet := &fakeKubelet{answer: &podresourcesapi.ListPodResourcesResponse{PodResources: []*podresourcesapi.PodResources{
		{Name: "train", Namespace: "a", Containers: []*podresourcesapi.ContainerResources{
			{Name: "main", Devices: []*podresourcesapi.ContainerDevices{
				device("nvidia.com/gpu", "GPU-2"), device("nvidia.com/mig-1g.5gb", "MIG-1"), device("nvidia.com/gpu", "GPU-1"),
			}},
			{Name: "side", Devices: []*podresourcesapi.ContainerDevices{device("nvidia.com/gpu", "GPU-3")}},
		}},
		{Name: "idle", Namespace: "a", Containers: []*podresourcesapi.ContainerResources{{Name: "main"}}},
	}}}
	socket := filepath.Join(t.TempDir(), "k.sock")
	listener, err := net.Listen("unix", socket)
	if err != nil {
		t.Fatal(err)
	}
	server := grpc.NewServer()
	podresourcesapi.RegisterPodResourcesListerServer(server, kubelet)
	go func() { _ = server.Serve(listener) }()
	defer server.Stop()

	got, err := List(t.Context(), socket)
	if err != nil {
		t.Fatal(err)
	}
	want := []Allocation{
		{Namespace: "a", Pod: "train", Container: "main", Resource: "nvidia.com/gpu", Devices: []string{"GPU-1", "GPU-2"}},
		{Namespace: "a", Pod: "train", Container: "main", Resource: "nvidia.com/mig-1g.5gb", Devices: []string{"MIG-1"}},
		{Namespace: "a", Pod: "train", Container: "side", Resource: "nvidia.com/gpu", Devices: []string{"GPU-3"}},
	}
	if diff := cmp.Diff(want, got); diff != "" {
		t.Errorf("List (-want +got):\n%s", diff)
	}
}

func TestListSaysWhichSocketDoesNotAnswer(t *testing.T) {
	_, err := List(t.Context(), "/nonexistent/k.sock")
	if err == nil {
		t.Fatal("no error")
	}
}

func TestCheckpoint(t *testing.T) {
	dir := t.TempDir()
	if got, err := Checkpoint(dir); err != nil || got != nil {
		t.Fatalf("missing file: got %v, %v; want nothing", got, err)
	}
	write := func(text string) {
		t.Helper()
		if err := os.WriteFile(filepath.Join(dir, "kubelet_internal_checkpoint"), []byte(text), 0o600); err != nil {
			t.Fatal(err)
		}
	}
	write(`{"Data":{"PodDeviceEntries":[{"PodUID":"u","ContainerName":"c","ResourceName":"nvidia.com/gpu",
		"DeviceIDs":{"1":["GPU-b"],"-1":["GPU-a"]},"AllocResp":"eA=="}],"RegisteredDevices":{}},"Checksum":7}`)
	got, err := Checkpoint(dir)
	if err != nil {
		t.Fatal(err)
	}
	want := []Entry{{PodUID: "u", Container: "c", Resource: "nvidia.com/gpu", Devices: []string{"GPU-a", "GPU-b"}}}
	if diff := cmp.Diff(want, got); diff != "" {
		t.Errorf("Checkpoint (-want +got):\n%s", diff)
	}
	for _, bad := range []string{"", "{}", `{"Data":null}`, `{"Data":{"PodDeviceEntries":3}}`} {
		write(bad)
		if _, err := Checkpoint(dir); err == nil {
			t.Errorf("Checkpoint accepted %q", bad)
		}
	}
}
